"""The law on the smallest scale: a mesh changes where numbers are computed, not what they are."""

import dataclasses
import math
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.config.load import load_config
from trainer.config.schema import Config, replace
from trainer.distributed import find_place
from trainer.models.llama.config import DEBUG
from trainer.models.llama.model import Llama, initial_std
from trainer.models.llama.plan import BLOCKS, TENSOR_PARALLEL
from trainer.parallel.mesh import DATA_AXES, Mesh, build_mesh
from trainer.parallel.parallelize import Layout, initialize, parallelize
from trainer.parallel.simple_fsdp import Precision
from trainer.parity.case import Case
from trainer.parity.choose import TINY_ARGUMENTS, choose_full, choose_quick, list_meshes, settle
from trainer.parity.train import Result
from trainer.parity.verify import FLOAT32_BOUND, Row, find_excess, measure_distance, verify

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "verify_parity.py"
# 6 of the command's 20 steps, which are enough for all labels to be seen once, and 8 rows a step, as few as 4 ranks
# and two microbatches allow.
BASE = replace(
    settle(load_config(TINY_ARGUMENTS).config, processes=2), {"training.steps": 6, "training.global_batch_size": 8}
)
SHAPE = dataclasses.replace(DEBUG, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=50, vocab_size=257)
RECOMPUTE = ("full", "selective 2", "selective op")

TWO_RANKS = [
    Case(microbatches=4, optimizer="SGD"),
    Case(shard=2),
    Case(shard=2, regather=False),
    *(Case(shard=2, recompute=recompute) for recompute in RECOMPUTE),
    Case(shard=2, optimizer="SGD", microbatches=2),
    Case(shard=2, tied=True, optimizer="SGD"),
    Case(tp=2, optimizer="SGD"),
    Case(tp=2, tied=True, microbatches=2, loss_parallel=False),
    Case(shard=2, tied=True, microbatches=2, gather_once=True, optimizer="SGD"),
    Case(shard=2, fsdp2=True, optimizer="SGD"),
    Case(shard=2),  # the same bits as the first time
]
TWO_COMPILED = [
    Case(shard=2, backend="aot_eager"),
    Case(shard=2, backend="aot_eager", loss_inside=False, tied=True, regather=False, microbatches=2),
    Case(shard=2, backend="aot_eager", bucketing="auto"),
    Case(shard=2, backend="aot_eager", bucketing="none", recompute="full"),
    Case(shard=2, backend="aot_eager", recompute="selective 2"),
    Case(shard=2, backend="aot_eager", recompute="selective op"),
    Case(shard=2, backend="aot_eager", recompute="memory_budget 0.3"),
    Case(tp=2, backend="aot_eager", recompute="full"),
    Case(shard=2, backend="aot_eager", microbatches=2, gather_once=True, recompute="full"),
    Case(shard=2, backend="inductor", optimizer="SGD"),
]
FOUR_RANKS = [
    Case(shard=4),
    Case(replicate=2, shard=2, optimizer="SGD"),
    Case(replicate=4, tied=True),
    Case(tp=4, optimizer="SGD"),
    Case(shard=2, tp=2, optimizer="SGD"),
    Case(replicate=2, tp=2, tied=True, optimizer="SGD"),
]
# An automatic plan under tensor parallelism wants widths that its ranks divide.
EVEN = replace(BASE, {"model.args.ffn_dim": 48, "model.args.vocab_size": 258})
AUTO = [Case(shard=2, tp=2, backend="aot_eager", bucketing="auto", recompute="full")]
FOUR_COMPILED = [
    Case(replicate=2, shard=2, backend="aot_eager"),
    Case(replicate=2, shard=2, backend="aot_eager", optimizer="SGD"),
    Case(shard=2, tp=2, tied=True, backend="aot_eager"),
    Case(shard=2, tp=2, tied=True, backend="aot_eager", microbatches=2, gather_once=True),
    Case(shard=4, precision="bfloat16"),
    Case(shard=2, tp=2, precision="bfloat16", optimizer="SGD"),
]


def check(rank: int, cases: list[Case], base: Config = BASE) -> list[Row]:
    place = dataclasses.replace(find_place(), device=torch.device("cpu"))
    return list(verify(cases, base, place))


def failures_of(cases: list[Case], ranks: int, base: Config = BASE) -> dict[str, Any]:
    rows, *others = run_ranks(check, ranks, cases, base, timeout_seconds=400)
    assert all(rows == other for other in others), "every rank is given the same table"
    assert [row.case for row in rows] == cases
    return {str(row.case): row.failures for row in rows if row.failures}


@pytest.mark.parametrize(
    ("cases", "ranks"),
    [
        (TWO_RANKS, 2),
        (FOUR_RANKS, 4),
        pytest.param(TWO_COMPILED, 2, marks=pytest.mark.slow),
        pytest.param(FOUR_COMPILED, 4, marks=pytest.mark.slow),
    ],
    ids=["2", "4", "2 compiled", "4 compiled"],
)
def test_a_mesh_changes_no_loss_norm_or_weight(cases: list[Case], ranks: int) -> None:
    assert failures_of(cases, ranks) == {}


@pytest.mark.slow
def test_an_automatic_plan_changes_no_loss_norm_or_weight_under_tensor_parallelism() -> None:
    assert failures_of(AUTO, 4, EVEN) == {}


def check_with_means(rank: int, cases: list[Case]) -> list[Row]:
    """Let sums over data ranks be means, as a communication backend or an average in a wrapper would make them."""
    right = Mesh.sum

    def wrong(mesh: Mesh, value: Tensor, over: tuple[str, ...] = DATA_AXES) -> Tensor:
        ranks = math.prod(mesh.axes[axis].size() for axis in over)
        return right(mesh, value, over) / ranks

    Mesh.sum = wrong  # type: ignore[method-assign]
    return check(rank, cases)


def test_a_mean_in_the_place_of_a_sum_fails_with_sgd_though_the_loss_is_right() -> None:
    (row,), _ = run_ranks(check_with_means, 2, [Case(shard=2, optimizer="SGD")])
    assert any(failure.startswith("norm") for failure in row.failures), row


def test_a_value_that_is_not_finite_is_beyond_any_bound() -> None:
    good = Result([1.0, 1.0], [1.0, 1.0], weights={"w": torch.ones(2)})
    for bad in (
        dataclasses.replace(good, losses=[1.0, math.nan]),
        dataclasses.replace(good, norms=[math.inf, 1.0]),
        dataclasses.replace(good, weights={"w": torch.tensor([1.0, math.nan])}),
    ):
        assert len(list(find_excess(measure_distance(bad, good), FLOAT32_BOUND))) == 1
    assert not list(find_excess(measure_distance(good, good), FLOAT32_BOUND))


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 8])
def test_the_quick_selection_has_every_kind_of_mesh_and_every_choice(processes: int) -> None:
    base = settle(load_config(TINY_ARGUMENTS).config, processes)
    cases = choose_quick(base, processes, is_tiny=True)
    meshes, _ = list_meshes(base, processes)
    assert {case.mesh for case in meshes} == {case.mesh for case in cases}
    assert all(processes % case.ranks == 0 for case in cases)
    kinds = {(case.replicate > 1, case.shard > 1, case.tp > 1) for case in cases}
    assert len(kinds) == {1: 1, 2: 4, 3: 3, 4: 7, 8: 8}[processes]
    values: dict[str, set[Any]] = {
        name: {getattr(case, name) for case in cases} for name in ("backend", "optimizer", "precision", "recompute")
    }
    assert values["backend"] == {"eager", "aot_eager", "inductor"}
    assert values["optimizer"] == {"SGD", "AdamW"}
    assert values["precision"] == {"float32", "bfloat16"}
    assert values["recompute"] == {"none", *RECOMPUTE, "memory_budget 0.3"}
    assert {case.microbatches for case in cases} == {1, 2, 4}
    assert {case.tied for case in cases} == {case.regather for case in cases} == {False, True}
    assert set(cases) <= set(choose_full(base, processes, is_tiny=True))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--processes", "0"], "at least 1"),
        (["--quick", "--full"], "not allowed with"),
        (["--training.seq_lem", "8"], "training.seq_len"),
        (["--config", "nowhere"], "nowhere"),
        (["--world-size", "4"], "belong to train.py"),
    ],
)
def test_the_command_refuses_what_it_cannot_follow(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        sys.exit(runpy.run_path(str(SCRIPT))["main"]([*arguments, "--device", "cpu"]))
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_checks_the_model_of_a_config_and_writes_the_table(tmp_path: Path) -> None:
    """Its eager cases, on every mesh: what compilers do is checked above, and the command does nothing else to it."""
    shrink = [
        "--model.args.n_layers=1",
        "--model.args.dim=64",
        "--training.seq_len=32",
        "--training.global_batch_size=8",
        "--model.args.vocab_size=257",
    ]
    table = tmp_path / "table.md"
    command = [sys.executable, SCRIPT, "--config", "llama3_debug", "--processes", "2", "--device", "cpu"]
    command += ["--only", "eager, SGD", "--markdown", table, *shrink]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done
    assert "all PASS" in done.stdout
    assert "left out: --only 'eager, SGD': all others" in done.stdout
    for mesh in ("1 process", "FSDP 2", "DDP 2", "TP 2"):
        assert f"| {mesh}, eager, SGD, fp32 |" in table.read_text()


def gradients_of(rank: int) -> dict[str, Any]:
    mesh = build_mesh(torch.device("cpu"), dp_replicate=1, dp_shard=2)
    with torch.device("meta"):
        model = Llama(SHAPE)
    parallelize(model, mesh, Layout(TENSOR_PARALLEL, BLOCKS, Precision(torch.bfloat16, torch.float32)))
    initialize(model, torch.device("cpu"), initial_std(SHAPE), seed=0)
    model.tok_embeddings.requires_grad_(False)
    used = model.layers["0"].attention.wq.weight
    logits = model(torch.zeros(1, 4, dtype=torch.int64))
    logits.float().sum().backward()
    stored = dict(model.named_parameters())
    return {
        "gathered": (type(used), used.dtype, tuple(used.shape)),
        "logits": logits.dtype,
        "frozen": stored["tok_embeddings.weight"].grad is None,
        "same placement": all(
            isinstance(p, DTensor) and p.grad.placements == p.placements and p.grad.dtype == p.dtype
            for p in stored.values()
            if p.grad is not None
        ),
        "with gradient": sum(p.grad is not None for p in stored.values()),
        "names": list(model.state_dict()) == list(Llama(SHAPE).state_dict()),
    }


def test_reading_a_parameter_gathers_it_and_its_gradient_is_stored_as_it_is() -> None:
    for seen in run_ranks(gradients_of, 2):
        assert seen["gathered"] == (torch.Tensor, torch.bfloat16, (32, 32))
        assert seen["logits"] == torch.bfloat16
        assert seen["frozen"]
        assert seen["same placement"]
        assert seen["with gradient"] == 2 * 9 + 2
        assert seen["names"]
