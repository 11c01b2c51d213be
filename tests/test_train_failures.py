"""What goes wrong in a run ends it with the cause in sight, soon, and with everything saved before intact."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from ranks import run_ranks
from tiny_run import arguments, launch_all, launch_once, log_lines, read_numbers, write_dataset

from trainer.build import SAVE_TIMEOUT_SECONDS, Run
from trainer.checkpoint import save
from trainer.distributed import end_failed_rank, find_place, host_group, set_timeout
from trainer.loop import Ending

ROOT = Path(__file__).resolve().parents[1]


def seconds_of(group: dist.ProcessGroup) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def read_limits(rank: int, argv: list[str]) -> dict[str, list[float]]:
    limits = {}

    def note(run: Run) -> None:
        run_groups.append(run)
        limits["host before"] = [seconds_of(run.host_group)]

    run_groups: list[Run] = []
    launch_once(argv, change=note)
    (run,) = run_groups
    limits["steps"] = [seconds_of(group) for group in [*run.mesh.groups(), run.host_group]]
    limits["saving"] = [seconds_of(run.save_group)]
    return limits


def test_the_time_limits_reach_every_group_and_saving_keeps_its_own(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    limits = {"comm__init_timeout_seconds": 77, "comm__train_timeout_seconds": 33, "training__steps": 2}
    for seen in run_ranks(read_limits, 2, arguments(tmp_path, **limits)):
        assert seen["host before"] == [77]
        assert set(seen["steps"]) == {33}
        assert seen["saving"] == [SAVE_TIMEOUT_SECONDS]


def wait_alone(rank: int) -> float:
    group = host_group(60)
    set_timeout(1, [group])
    began = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.zeros(1), group=group)
    return time.monotonic() - began


def test_a_collective_ends_at_its_time_limit() -> None:
    assert run_ranks(wait_alone, 2)[0] < 10


def fail_one_after_the_other(rank: int) -> list[str]:
    codes: list[int] = []
    with log_lines() as lines, patch("os._exit", codes.append):
        for failing in (1, 0):
            if rank == failing:
                try:
                    raise RuntimeError("the cause" if rank == 1 else "Connection closed by peer\n[more]")
                except RuntimeError as error:
                    end_failed_rank(find_place(), error)
            dist.barrier()
    assert codes == [1]
    return lines


def test_the_first_failure_is_shown_and_later_ones_point_to_it() -> None:
    victim, cause = run_ranks(fail_one_after_the_other, 2)
    assert cause == ["ERROR Rank 1 failed"]
    assert victim == [
        "ERROR Rank 0 ended (RuntimeError: Connection closed by peer) after the failure of "
        "rank 1: RuntimeError: the cause"
    ]


def launch_with_full_disk(rank: int, argv: list[str]) -> Any:
    """Let rank 1 run out of disk in the middle of its second save, then launch again."""
    write_data = save.FileSystemWriter.write_data
    saves = []

    def fail(*arguments: Any) -> Any:
        saves.append(1)
        if rank == 1 and len(saves) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_data(*arguments)

    save.FileSystemWriter.write_data = fail  # type: ignore[method-assign]
    return [launch_once(argv), launch_once(argv)]


def test_a_disk_that_fills_up_in_a_save_costs_that_save_only(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    command = arguments(tmp_path, training__steps=6, checkpoint__interval=2)
    for failed, resumed in run_ranks(launch_with_full_disk, 2, command):
        assert "the checkpoint of step 4 was not saved" in failed.error
        assert "rank 1: OSError: [Errno 28] No space left on device" in failed.error
        assert "Earlier checkpoints are untouched" in failed.error
        assert resumed.ending is Ending.COMPLETED
    run_ranks(launch_all, 2, [arguments(tmp_path, "straight", training__steps=6)])
    assert read_numbers(tmp_path / "run") == read_numbers(tmp_path / "straight")


def launch_with_full_tensorboard(rank: int, argv: list[str]) -> Any:
    def fail(*arguments: Any, **settings: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def change(run: Run) -> None:
        run.metrics._tensorboard.add_scalar = fail  # type: ignore[method-assign, union-attr]

    return launch_once(argv, change=change)


full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to /dev/full")


@full_device
def test_metrics_that_cannot_be_written_stop_the_run(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    ((result,),) = run_ranks(launch_all, 1, [arguments(tmp_path)])
    assert "cannot write metrics: No space left on device" in result.error
    assert str(tmp_path / "run" / "metrics.jsonl") in result.error
    assert "During handling" not in result.error, "closing the file fails once more, which says nothing new"
    command = arguments(tmp_path, "other", metrics__enable_tensorboard=True)
    (result,) = run_ranks(launch_with_full_tensorboard, 1, command)
    assert "No space left on device" in result.error


@pytest.mark.slow
@full_device
def test_a_real_failure_of_one_rank_shows_its_cause_once_and_ends_all(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(ROOT / "train.py")]
    done = subprocess.run([*command, *arguments(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert done.stdout.count(" failed\nTraceback") == 1
    assert "Rank 0 failed" in done.stdout
    assert "after the failure of rank 0: OSError" in done.stdout or "Rank 1" not in done.stdout
    assert "cannot write metrics: No space left on device" in done.stdout
    assert "No space left on device" in done.stderr.partition("Root Cause")[2], "torchrun's report tells it too"


def launch_without_compiler(rank: int, argv: list[str]) -> Any:
    if rank == 1:
        inductor_config.cpp.cxx = (None, "/bin/false")  # torch reads CXX when it is imported, which is over
    return launch_once(argv)


def test_without_a_toolchain_on_one_rank_all_run_without_inductor(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    command = arguments(tmp_path, compile__enable=True, training__steps=3)
    first, second = run_ranks(launch_without_compiler, 2, command)
    assert first.ending is Ending.COMPLETED
    assert second.ending is Ending.COMPLETED
    (warning,) = [line for line in first.log if line.startswith("WARNING compile.backend")]
    assert "'inductor' has no working C++ toolchain on rank 1" in warning
    assert "/bin/false" in warning
    assert "using 'aot_eager'" in warning
    assert any("Compiling the model as one graph with aot_eager" in line for line in first.log)
