"""Every rank plans by itself, from its own graphs. Where shards are uneven these differ; what is decided must not."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from overlap_graphs import MIXED, SHAPE
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.fx import GraphModule

from trainer.distributed import fake_process_group
from trainer.loss import UNCOUNTED, sum_token_losses
from trainer.models.llama.config import LlamaConfig
from trainer.models.llama.model import Llama
from trainer.models.llama.plan import BLOCKS, TENSOR_PARALLEL
from trainer.parallel.mesh import build_mesh
from trainer.parallel.overlap.auto import Candidate, World, judge, plan_automatically
from trainer.parallel.overlap.cost import rings_of
from trainer.parallel.overlap.find import find_collectives
from trainer.parallel.overlap.hardware import HARDWARE
from trainer.parallel.overlap.plan import plan_by_block
from trainer.parallel.overlap.trace import trace
from trainer.parallel.parallelize import Layout, parallelize
from trainer.parallel.partition import Partition
from trainer.parallel.simple_fsdp import Precision
from trainer.parallel.tensor import build_loss

SMALL = dataclasses.replace(SHAPE, n_layers=2)
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a mesh; by default its 257 words and 50 columns aren't divided evenly."""

    replicate: int = 1
    shard: int = 4
    tp: int = 1
    shape: LlamaConfig = SMALL
    precision: Precision = MIXED
    regather: bool = True
    recompute: tuple[str, str] = ("none", "")
    memory_budget: float = 1.0
    backend: str = "inductor"

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.tp


# Every value of every axis once; where several differ from the first case, a failure names what it is about.
CASES = {
    "short last shard": Case(shard=4),
    "unfused": Case(shard=2, backend="aot_eager"),
    "no cast before the gather": Case(shard=4, precision=Precision(FLOAT32, FLOAT32)),
    "empty shards, recomputed blocks": Case(shard=64, recompute=("full", "")),
    "replicas, cast gradients": Case(replicate=2, shard=4, precision=Precision(BFLOAT16, BFLOAT16)),
    "tensor parallel": Case(shard=3, tp=2, shape=dataclasses.replace(SMALL, vocab_size=256)),
    "replicas of empty shards, kept weights, a memory budget": Case(
        replicate=2, shard=64, regather=False, memory_budget=0.5
    ),
}
FAST = ("short last shard", "unfused")


@functools.cache
def traced_of(case: Case, rank: int) -> tuple[dict[str, GraphModule], World]:
    """Trace one rank's graphs."""
    _clear_sharding_prop_cache()  # it holds meshes, which are equal on all ranks but know which rank they are of
    with fake_process_group(case.ranks, rank):
        mesh = build_mesh(torch.device("cpu"), dp_replicate=case.replicate, dp_shard=case.shard, tp=case.tp)
        with torch.device("meta"):
            model = Llama(case.shape)
        parallelize(model, mesh, Layout(TENSOR_PARALLEL, BLOCKS, case.precision, *case.recompute))
        partition = Partition(case.regather, case.memory_budget)
        loss = build_loss(
            sum_token_losses, mesh, vocab_size=case.shape.vocab_size, uncounted=UNCOUNTED, loss_parallel=True
        )
        traced = trace(model, loss, rows=1, seq_len=16, partition=partition, backend=case.backend)
        world = World(mesh.axis_of_group(), rings_of(mesh), HARDWARE["H100"], fuse=case.backend == "inductor")
        return {"forward": traced.forward, "backward": traced.backward}, world


def facts(candidate: Candidate) -> dict[str, Any]:
    """Return all that is decided and forecast, without names of nodes."""
    priced, simulation = candidate.priced, candidate.simulation
    return {
        "plan": [(b.stage, b.label, [(c.kind, c.axis, c.module) for c in b.collectives]) for b in candidate.buckets],
        "collectives": [
            (c.kind, c.axis, c.dtype, c.modules, priced.seconds[c.start]) for c in priced.collectives.values()
        ],
        "seconds": list(priced.seconds.values()),
        "step": simulation.seconds,
        "exposed": list(simulation.exposed.values()),
        "peak": simulation.peak,
    }


def decide(case: Case, rank: int) -> dict[str, Any]:
    """Return what one rank decides and forecasts about every plan of both its graphs."""
    graphs, world = traced_of(case, rank)
    found: dict[str, Any] = {}
    for direction, gm in graphs.items():
        candidates = plan_automatically(gm, world, blocks=BLOCKS, limit_bytes=1e12)
        found[f"{direction}: order"] = [candidate.name for candidate in candidates]
        found |= {f"{direction}: {candidate.name}": facts(candidate) for candidate in candidates}
        by_block = plan_by_block(find_collectives(gm, world.axes), BLOCKS)
        found[f"{direction}: by block"] = facts(judge(gm, world, "block", by_block))
    return found


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_all_ranks_decide_and_forecast_alike(name: str) -> None:
    case = CASES[name]
    first, last = decide(case, 0), decide(case, case.ranks - 1)
    assert first.keys() == last.keys()
    for what, facts_of_first in first.items():
        assert last[what] == facts_of_first, what


@pytest.mark.parametrize("name", FAST)
def test_the_graphs_of_the_ranks_differ(name: str) -> None:
    """The test above would say nothing if they didn't."""
    case = CASES[name]
    counts = [len(traced_of(case, rank)[0]["backward"].graph.nodes) for rank in (0, case.ranks - 1)]
    assert counts[0] != counts[1]
