"""Graphs of a small Llama on a fake process group, as traced, and copies of them that the passes have arranged."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from trainer.distributed import fake_process_group
from trainer.loss import UNCOUNTED, sum_token_losses
from trainer.models.llama.config import DEBUG, LlamaConfig
from trainer.models.llama.model import Llama, initial_std
from trainer.models.llama.plan import BLOCKS, TENSOR_PARALLEL
from trainer.parallel.compile import build_sum_losses
from trainer.parallel.float8.apply import NOTHING_IN_FLOAT8, Float8
from trainer.parallel.graph_report import GraphReport
from trainer.parallel.mesh import build_mesh
from trainer.parallel.overlap.arrange import PLAIN, Overlap, arrange
from trainer.parallel.overlap.find import Collective, find_collectives
from trainer.parallel.parallelize import Layout, initialize, parallelize
from trainer.parallel.partition import Partition
from trainer.parallel.simple_fsdp import Precision
from trainer.parallel.tensor import build_loss

SHAPE = dataclasses.replace(DEBUG, dim=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=50, vocab_size=257)
# The 8B model's 32 blocks, small, with rows that 64 ranks divide.
LLAMA_8B = dataclasses.replace(SHAPE, n_layers=32, dim=64, head_dim=32, ffn_dim=128)
MIXED = Precision(torch.bfloat16, torch.float32)


class Graphs(NamedTuple):
    """Both directions of one step, and what the process groups in them are."""

    forward: GraphModule
    backward: GraphModule
    axes: dict[str, str]

    def arranged(self, overlap: Overlap) -> Graphs:
        """Return arranged copies; whether they are sorted is checked."""
        copies = Graphs(copy_graph(self.forward), copy_graph(self.backward), self.axes)
        # The passes ask the process groups nothing, but fake collectives ask that they exist.
        for gm in copies[:2]:
            arrange(gm, self.axes, overlap)
            gm.graph.lint()
        return copies

    def collectives(self, direction: str, axis: str = "dp_shard") -> list[Collective]:
        return [c for c in find_collectives(getattr(self, direction), self.axes) if c.axis == axis]


@dataclasses.dataclass
class Recorder(GraphReport):
    """Also keeps the graphs themselves."""

    graphs: list[GraphModule] = dataclasses.field(default_factory=list)

    def record(self, graphs: Mapping[str, GraphModule], plans: Mapping[str, list[str]]) -> None:
        super().record(graphs, plans)
        self.graphs = list(graphs.values())


@functools.cache
def trace(
    *,
    shape: LlamaConfig = SHAPE,
    replicate: int = 1,
    shard: int = 1,
    tp: int = 1,
    regather: bool = True,
    recompute: tuple[str, str] = ("none", ""),
    precision: Precision = MIXED,
    overlap: Overlap = PLAIN,
    float8: Float8 = NOTHING_IN_FLOAT8,
    change: Callable[[nn.Module], None] | None = None,
) -> Graphs:
    """Trace one step of a Llama. `change` may alter the model once it is parallelized."""
    torch._dynamo.reset()
    with fake_process_group(replicate * shard * tp):
        mesh = build_mesh(torch.device("cpu"), dp_replicate=replicate, dp_shard=shard, tp=tp)
        with torch.device("meta"):
            model = Llama(shape)
        parallelize(model, mesh, Layout(TENSOR_PARALLEL, BLOCKS, precision, *recompute, float8))
        initialize(model, torch.device("cpu"), initial_std(shape), seed=0)
        if change:
            change(model)
        recorder = Recorder(mesh.axis_of_group())
        loss = build_loss(sum_token_losses, mesh, vocab_size=shape.vocab_size, uncounted=UNCOUNTED, loss_parallel=True)
        sum_losses = build_sum_losses(
            model,
            loss,
            enable=True,
            backend="aot_eager",
            loss_inside=True,
            partition=Partition(regather, overlap=overlap),
            report=recorder,
        )
        tokens = torch.zeros(1, 16, dtype=torch.int64)
        sum_losses(tokens, tokens)
        forward, backward = recorder.graphs
        return Graphs(forward, backward, dict(recorder.axes))


def copy_graph(gm: GraphModule) -> GraphModule:
    """Return a copy whose nodes may be changed; their values are shared."""
    graph, nodes = Graph(), {}
    result: Any = graph.graph_copy(gm.graph, nodes)
    graph.output(result)
    return GraphModule(gm, graph)


def positions(gm: GraphModule) -> dict[Node, int]:
    return {node: index for index, node in enumerate(gm.graph.nodes)}
