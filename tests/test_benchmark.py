"""The benchmark compares like with like: turns, ratios, the check of losses, FSDP2's set-up, and what is written."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import runpy
import signal
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.distributed.fsdp import FSDPModule

from trainer.benchmark import measure as measuring
from trainer.benchmark.chart import page
from trainer.benchmark.measure import Measurement, list_turns, measure, measure_memory
from trainer.benchmark.result import Result
from trainer.benchmark.saving import SavingResult, measure_saving
from trainer.benchmark.variants import VARIANTS, Setup, build_variant
from trainer.config.load import load_config
from trainer.config.schema import Config
from trainer.distributed import fake_process_group
from trainer.models.llama.config import count_parameters
from trainer.models.registry import build_shape
from trainer.parallel.overlap.hardware import HARDWARE, Hardware
from trainer.parts import build_mesh_of
from trainer.ranks import start_ranks

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "benchmark.py"
TINY = [
    *("--config", "benchmark_communication.toml", "--model.args.n_layers", "2", "--model.args.dim", "32"),
    *("--model.args.ffn_dim", "48", "--model.args.vocab_size", "64", "--training.seq_len", "8"),
]
DRIFT = (1.0, 3.0, 0.5, 2.0, 1.5)


def tiny(*argv: str) -> Config:
    return load_config([*TINY, *argv]).config


def setup_of(config: Config, ranks: int, hardware: Hardware | None = None) -> Setup:
    cpu = torch.device("cpu")
    return Setup(config, build_mesh_of(config, cpu, ranks), cpu, hardware)


def result_of(*measurements: Measurement, precision: str = "float32") -> Result:
    return Result(measurements, "tiny <case>", tokens_per_step=64, precision=precision, ranks=2, device="cpu")


def drifting(variant: str, seconds: float, losses: tuple[float, ...] = (3.0, 2.0)) -> Measurement:
    """A variant on a machine whose speed drifts."""
    return Measurement(variant, samples=[seconds * slow for slow in DRIFT], losses=list(losses), peak_bytes=1 << 20)


def test_every_round_has_every_variant_once_and_each_comes_first_as_often() -> None:
    names = ["a", "b", "c"]
    turns = list(list_turns(names, rounds=6))
    assert all(sorted(turn) == names for turn in turns)
    assert sorted(turn[0] for turn in turns) == sorted(names * 2)
    followers = {(before, after) for turn in turns for before, after in pairwise(turn)}
    assert len(followers) == 3, "in every round but where it comes first, a variant has the same one before it"


def test_ratios_do_not_see_a_drifting_machine() -> None:
    slow, fast = drifting("fsdp2", 0.2), drifting("block", 0.1)
    result = result_of(slow, fast)
    assert result.ratio(fast, "fsdp2") == pytest.approx(2.0)
    assert result.ratio(slow, "fsdp2") == 1.0
    assert result.ratio(fast, "fsdp2+compile") is None


@pytest.mark.parametrize(("precision", "allowed", "wrong"), [("float32", 1e-5, 1e-3), ("bfloat16", 1e-3, 1e-2)])
def test_a_variant_with_other_losses_is_wrong(precision: str, allowed: float, wrong: float) -> None:
    right = drifting("fsdp2", 1.0)
    near = drifting("block", 1.0, (3.0, 2.0 * (1 + allowed)))
    assert result_of(right, near, precision=precision).find_wrong() == []
    for loss in (2.0 * (1 + wrong), math.nan, math.inf):
        other = drifting("auto", 1.0, (3.0, loss))
        (line,) = result_of(right, near, other, precision=precision).find_wrong()
        assert line.startswith("auto: ")


def test_the_json_holds_every_sample_and_what_they_were_taken_on() -> None:
    result = result_of(drifting("fsdp2", 0.2), drifting("block", 0.1))
    written = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert [found["samples"] for found in written["variants"]] == [m.samples for m in result.measurements]
    assert written["variants"][1]["ratios"] == {"fsdp2": pytest.approx(2.0), "fsdp2+compile": None}
    assert written["machine"]["torch"] == torch.__version__
    assert written["machine"]["ranks"] == 2
    assert written["machine"]["threads a rank"] == torch.get_num_threads()


class Elements(HTMLParser):
    """Collects what a page would load, and how many bars it has."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str | None] = []
        self.bars = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        self.bars += tag == "rect"


def test_the_chart_has_a_bar_for_each_variant_and_loads_nothing() -> None:
    text = page(result_of(drifting("fsdp2", 0.2), drifting("block", 0.1)))
    elements = Elements()
    elements.feed(text)
    assert (elements.bars, elements.loads) == (2, [])
    assert "tiny &lt;case&gt;" in text
    assert "100.0 ms" not in text, "the median of a drifting machine"
    assert "150.0 ms, 2.00x fsdp2, 1 MiB" in text


def test_fsdp2_is_sharded_by_block_then_by_the_rest_and_sums_as_ours() -> None:
    config = tiny("--training.mixed_precision_param", "bfloat16")
    with fake_process_group(2):
        model = build_variant("fsdp2", setup_of(config, 2)).model
    groups = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    assert list(groups) == ["", "layers.0", "layers.1"]
    for module in groups.values():
        (group,) = module._get_fsdp_state()._fsdp_param_groups
        assert group.mp_policy.param_dtype is torch.bfloat16
        assert group.mp_policy.reduce_dtype is torch.float32
        assert group.gradient_divide_factor == 1.0
        assert group.post_forward_mesh_info is not None, "it frees weights after forward, as by default"


def train(rank: int, variants: list[str]) -> list[Measurement]:
    return measure(setup_of(tiny(), 2), variants, steps=2, rounds=2)


def test_variants_train_the_same_on_two_ranks() -> None:
    first, second = run_ranks(train, 2, ["fsdp2", "eager"])
    assert first == second, "the slowest rank's seconds and the joint losses"
    for found in first:
        assert len(found.losses) == measuring.WARM_UP_STEPS + 2 * 2
        assert len(found.samples) == 2
        assert min(found.samples) > 0
        assert found.first_step_seconds > 0
    assert len(set(first[0].losses)) == len(first[0].losses), "each step has tokens of its own"
    assert result_of(*first).find_wrong() == []


@pytest.mark.slow
def test_compiled_variants_train_the_same_on_two_ranks() -> None:
    first, _ = run_ranks(train_compiled, 2, list(VARIANTS), timeout_seconds=300)
    assert result_of(*first).find_wrong() == []


def train_compiled(rank: int, variants: list[str]) -> list[Measurement]:
    config = tiny("--compile.backend", "aot_eager", "--model.args.n_layers", "1")
    setup = setup_of(config, 2, HARDWARE["CPU"])
    return measure(setup, variants, steps=1, rounds=1)


def test_peaks_hold_at_least_weights_moments_and_gradients() -> None:
    config = tiny()
    shards = 4 * count_parameters(build_shape(config)) // 2
    peaks = measure_memory(config, ["fsdp2", "eager"], world_size=2)
    assert all(peak > 4 * shards for peak in peaks.values()), peaks


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--variants", "fsdp2,fsdp3"], "there is no fsdp3"),
        (["--rounds", "0"], "at least 1"),
        (["--parallelism.tensor_parallel_degree", "2"], "parallelism.tensor_parallel_degree = 2"),
        (["--activation_checkpoint.mode", "full"], "activation_checkpoint.mode = 'full'"),
        (["--dry-run"], "--dry-run"),
        (["--config", "none"], "none"),
    ],
)
def test_what_cannot_be_compared_is_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert runpy.run_path(str(SCRIPT))["main"]([*argv, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err


def end_by_signal() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def end_by_fault() -> int:
    faulthandler._sigsegv()
    return 0


def raise_error() -> int:
    raise ValueError("what went wrong")


def test_a_rank_that_dies_or_raises_is_told_of_and_makes_the_command_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert start_ranks(1, "cpu", end_by_signal) == 128 + signal.SIGKILL
    assert "Rank 0 was ended by SIGKILL" in capsys.readouterr().err
    assert start_ranks(1, "cpu", raise_error) == 1
    assert "what went wrong" in capsys.readouterr().err


def test_a_rank_that_dies_of_a_fault_tells_where(capfd: pytest.CaptureFixture[str]) -> None:
    assert start_ranks(1, "cpu", end_by_fault) == 128 + signal.SIGSEGV
    assert "in end_by_fault" in capfd.readouterr().err


def test_a_benchmark_of_wrong_numbers_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    door = runpy.run_path(str(SCRIPT))
    arguments, settings = door["parse_arguments"](["--variants", "fsdp2,eager", "--model.args.n_layers", "2"])
    found: list[Any] = [drifting("fsdp2", 1.0), drifting("eager", 1.0)]
    monkeypatch.setattr(measuring, "measure", lambda *_, **__: found)
    monkeypatch.setattr(measuring, "measure_memory", lambda *_: {"fsdp2": 1, "eager": 1})
    config = door["load"](arguments, settings, 1)
    for losses, code in (([3.0, 2.0], 0), ([3.0, 2.1], 1)):
        found[1].losses = losses
        assert door["run"](arguments, config, ["fsdp2", "eager"], "cpu") == code
        assert ("WRONG: eager" in capsys.readouterr().out) == bool(code)


def save_often(rank: int, folder: Path) -> SavingResult:
    return measure_saving(setup_of(tiny(), 2), saves=2, folder=folder, config="tiny")


def test_saves_in_step_and_beside_are_timed_and_leave_nothing(tmp_path: Path) -> None:
    results = run_ranks(save_often, 2, tmp_path)
    assert [results[0].state_bytes] == [results[1].state_bytes]
    assert [(s.mode, s.number) for s in results[0].saves] == [
        ("disabled", 1),
        ("disabled", 2),
        ("async", 1),
        ("async", 2),
    ]
    for saved in results[0].saves:
        assert 0 < saved.stall_seconds <= saved.until_sealed_seconds
        assert (saved.steps > 0) == (saved.mode == "async")
    assert "From the second save on, async stalls" in list(results[0].lines())[-1]
    assert list(tmp_path.iterdir()) == []
