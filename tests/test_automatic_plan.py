"""An automatic plan in a run: what it is made on is agreed and kept, and ranks that differ are stopped."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny_run import Result, arguments, assert_equal_weights, launch_all, launch_once, read_numbers, write_dataset

from trainer.parallel.overlap.hardware import HARDWARE, Hardware
from trainer.parallel.overlap.measure import find_hardware_of_run

AUTO = {"compile__enable": True, "compile__backend": "aot_eager", "compile__bucketing": "auto"}
BLOCK = AUTO | {"compile__bucketing": "block"}


def test_a_run_under_an_automatic_plan_is_the_run_by_block_and_a_resume_plans_on_the_same_hardware(
    tmp_path: Path,
) -> None:
    write_dataset(tmp_path)
    commands = [
        arguments(tmp_path, "block", training__steps=6, **BLOCK),
        arguments(tmp_path, "auto", training__steps=3, **AUTO),
        arguments(tmp_path, "auto", training__steps=6, **AUTO),
        arguments(tmp_path, "separate", training__steps=6, parallelism__fsdp_separate_gather_group=True, **BLOCK),
    ]
    (block, first, second, separate), _ = run_ranks(launch_all, 2, commands)
    assert read_numbers(tmp_path / "auto") == read_numbers(tmp_path / "block")
    assert read_numbers(tmp_path / "separate") == read_numbers(tmp_path / "block")
    assert_equal_weights(second.weights, block.weights)
    assert_equal_weights(separate.weights, block.weights)
    plans = [
        [line for line in text.splitlines() if "plan auto" in line] for text in map(compiled_text, (first, second))
    ]
    assert plans[0] == plans[1] != []
    assert json.loads((tmp_path / "auto" / "hardware.json").read_text())["name"].endswith("CPU")


def compiled_text(result: Result) -> str:
    return next(line for line in result.log if "Compiled " in line)


def launch_differently(rank: int, commands: list[list[str]]) -> Result:
    return launch_once(commands[rank])


def test_ranks_that_planned_differently_are_stopped_and_both_plans_named(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    commands = [arguments(tmp_path, **BLOCK), arguments(tmp_path, **(BLOCK | {"compile__bucketing": "none"}))]
    for result in run_ranks(launch_differently, 2, commands):
        assert result.ending is None
        assert "RuntimeError: Ranks have compiled graphs whose collectives differ" in result.error
        assert "of rank 0: forward: all_gather over dp_shard in float32 for layers.0.attention" in result.error
        assert "of rank 1: forward: all_gather over dp_shard in float32 for layers.0.attention" in result.error


def describe(rank: int, folder: Path) -> list[Hardware]:
    """Find the hardware twice, with another memory the second time; the ranks' own folders differ."""
    logging.disable()
    own = folder / str(rank)
    return [find_hardware_of_run(torch.device("cpu"), own, size, dist.group.WORLD) for size in (4 << 30, 8 << 30)]


def test_ranks_agree_on_measured_hardware_and_the_runs_folder_keeps_it(tmp_path: Path) -> None:
    first, second = run_ranks(describe, 2, tmp_path)
    assert first == second
    assert first[0] == first[1]
    assert os.listdir(tmp_path) == ["0"]
    assert first[0].memory_bytes == pytest.approx(4 << 30, rel=0.05)
    assert first[0].float32_flops > 1e9
    assert first[0].intra_node.bytes_per_second > 1e6
    (tmp_path / "0" / "hardware.json").write_text("{")
    again, _ = run_ranks(describe, 2, tmp_path)
    assert isinstance(again[0], Hardware)


def test_what_was_found_on_other_hardware_is_not_reused(tmp_path: Path) -> None:
    run_ranks(describe, 1, tmp_path)
    kept = json.loads((tmp_path / "0" / "hardware.json").read_text())
    kept |= {"found_on": "a machine of another kind", "name": "another"}
    (tmp_path / "0" / "hardware.json").write_text(json.dumps(kept))
    ((found, _),) = run_ranks(describe, 1, tmp_path)
    assert found.name != "another"


def test_a_gpu_of_the_table_is_recognised_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.parallel.overlap.measure import _look_up

    def look_up(name: str) -> Any:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        return _look_up(torch.device("cuda"))

    assert look_up("NVIDIA H100 80GB HBM3") is HARDWARE["H100"]
    assert look_up("NVIDIA A100-SXM4-80GB") is HARDWARE["A100"]
    assert look_up("NVIDIA A10") is look_up("NVIDIA L40S") is None
