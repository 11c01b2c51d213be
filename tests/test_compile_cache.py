"""The compile cache: a second start compiles nothing, and whatever changes a graph is part of the key."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from empty_kernels import leave_kernels_empty
from ranks import run_ranks

from trainer.loss import sum_token_losses
from trainer.models.llama.config import LlamaConfig, linear_layers
from trainer.models.llama.model import Llama, initial_std
from trainer.models.llama.plan import BLOCKS, TENSOR_PARALLEL
from trainer.parallel import tensor
from trainer.parallel.compile import build_sum_losses
from trainer.parallel.float8.apply import NOTHING_IN_FLOAT8, Float8
from trainer.parallel.graph_report import GraphReport, check_order
from trainer.parallel.mesh import Mesh, build_mesh
from trainer.parallel.overlap.arrange import PLAIN, Overlap
from trainer.parallel.overlap.auto import World
from trainer.parallel.overlap.cost import rings_of
from trainer.parallel.overlap.hardware import HARDWARE
from trainer.parallel.parallelize import Layout, initialize, parallelize
from trainer.parallel.partition import Partition
from trainer.parallel.simple_fsdp import Precision

# Of 33 rows one rank has 17 and the other 16: a graph of one is wrong for the other.
SHAPE = LlamaConfig(dim=16, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=24, vocab_size=33)


@dataclasses.dataclass(frozen=True)
class Case:
    regather: bool = True
    recompute: str = "none"
    option: str = ""
    overlap: Overlap = PLAIN
    hardware: str = "H100"
    float8: Float8 = NOTHING_IN_FLOAT8
    tp: int = 1
    other_source: bool = False
    other_backward: bool = False

    def build_mesh(self) -> Mesh:
        return build_mesh(torch.device("cpu"), dp_replicate=1, dp_shard=2 // self.tp, tp=self.tp)


def compile_afresh(rank: int, case: Case) -> GraphReport:
    """Compile and run one step in a fresh process, as a launch does."""
    return compile_once(case.build_mesh(), case)


def compile_once(mesh: Mesh, case: Case) -> GraphReport:
    torch._dynamo.reset()
    with torch.device("meta"):
        model = Llama(SHAPE)
    precision = Precision(torch.float32, torch.float32)
    parallelize(model, mesh, Layout(TENSOR_PARALLEL, BLOCKS, precision, case.recompute, case.option, case.float8))
    initialize(model, torch.device("cpu"), initial_std(SHAPE), seed=0)
    report = GraphReport(mesh.axis_of_group())
    world = World(mesh.axis_of_group(), rings_of(mesh), HARDWARE[case.hardware])
    sum_losses = build_sum_losses(
        model,
        sum_token_losses,
        enable=True,
        backend="inductor",
        loss_inside=True,
        partition=Partition(case.regather, overlap=dataclasses.replace(case.overlap, world=world)),
        report=report,
        agree=lambda order: check_order(order, dist.group.WORLD),
    )
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    # Whether graphs come from the cache doesn't depend on what C++ kernels compute, and compiling these takes longest.
    with pytest.MonkeyPatch.context() as patch:
        leave_kernels_empty(patch)
        sum_losses(tokens, tokens).backward()
    return report


class Missed(Exception):
    """The cache did not have the graphs."""


def look_up(rank: int, cases: list[Case]) -> list[bool]:
    """Say for each case whether the cache has its graphs, without compiling those that it hasn't."""

    def miss(*_: Any, **__: Any) -> None:
        raise Missed  # a graph that comes from the cache is not cut

    mesh, found = cases[0].build_mesh(), []
    for case in cases:
        uuid, split = Partition.uuid, tensor._ScatterSum.backward
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Partition, "__call__", miss)
            if case.other_source:
                patch.setattr(Partition, "uuid", lambda self, uuid=uuid: f"changed {uuid(self)}")
            if case.other_backward:
                patch.setattr(tensor._ScatterSum, "backward", lambda ctx, grad, split=split: split(ctx, grad * 2))
            try:
                found.append(compile_once(mesh, case).from_cache)
            except Exception as error:
                if "Missed" not in repr(error):  # the compiler wraps it
                    raise
                found.append(False)
    return found


@pytest.mark.slow
def test_a_second_start_hits_the_cache_and_every_change_misses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    base = Case(overlap=Overlap("block", reorder=True))
    first = run_ranks(compile_afresh, 2, base, timeout_seconds=400)
    assert not any(report.from_cache for report in first)
    # The forecast of other hardware changes no graph.
    second = run_ranks(compile_afresh, 2, dataclasses.replace(base, hardware="A100"), timeout_seconds=400)
    assert all(report.from_cache for report in second)
    assert [report.lines for report in second] == [report.lines for report in first]
    assert [report.order for report in second] == [report.order for report in first] != [None, None]
    changed = [
        dataclasses.replace(base, regather=False),
        dataclasses.replace(base, recompute="selective", option="op"),
        dataclasses.replace(base, overlap=PLAIN),
        dataclasses.replace(base, overlap=Overlap("auto", reorder=True, limit_bytes=1e9)),
        dataclasses.replace(base, other_source=True),
    ]
    # What was compiled comes last, and is found: it is not the process that misses those before it.
    for found in run_ranks(look_up, 2, [*changed, base], timeout_seconds=400):
        assert found == [False] * len(changed) + [True]


@pytest.mark.slow
def test_tensor_parallel_graphs_are_kept_and_what_their_backward_does_is_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    base = Case(tp=2)
    assert not any(report.from_cache for report in run_ranks(compile_afresh, 2, base, timeout_seconds=400))
    for found in run_ranks(look_up, 2, [dataclasses.replace(base, other_backward=True), base], timeout_seconds=400):
        assert found == [False, True]


@pytest.mark.slow
def test_float8_graphs_are_kept_and_the_recipe_and_its_gather_are_part_of_their_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layers = frozenset(name for name in linear_layers(SHAPE) if name != "output")
    gathered = Float8(layers, "tensorwise", gather=True, emulate=True)  # emulated: kernels don't take these widths
    for report in run_ranks(compile_afresh, 2, Case(float8=gathered), timeout_seconds=400):
        assert not report.from_cache
        assert "float8 (uint8)" in " ".join(report.lines["forward"])
    changed = [
        Case(float8=dataclasses.replace(gathered, gather=False)),
        Case(float8=dataclasses.replace(gathered, gather=False, recipe="rowwise")),
    ]
    for found in run_ranks(look_up, 2, [*changed, Case(float8=gathered)], timeout_seconds=400):
        assert found == [False, False, True]


def test_the_partitions_key_changes_with_its_settings_and_our_source(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [Partition(True), Partition(False), Partition(True, 0.5), Partition(True, overlap=Overlap("block"))]
    assert len({partition.uuid() for partition in keys}) == len(keys)
    here, there = (Overlap("block", world=World({}, {}, HARDWARE[name])) for name in ("H100", "A100"))
    assert Partition(True, overlap=here).uuid() == Partition(True, overlap=there).uuid(), "only the forecast differs"
    here, there = (dataclasses.replace(overlap, bucketing="auto") for overlap in (here, there))
    assert Partition(True, overlap=here).uuid() != Partition(True, overlap=there).uuid()
    before = Partition(True).uuid()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + b"# changed")
    assert Partition(True).uuid() != before
