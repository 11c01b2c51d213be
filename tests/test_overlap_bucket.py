"""Merging collectives: what a merged graph computes, on real process groups, and what its copies look like."""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from overlap_graphs import SHAPE, Recorder, copy_graph, trace
from ranks import run_ranks
from torch import Tensor, nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule

from trainer.loss import UNCOUNTED, sum_token_losses
from trainer.models.llama.model import Llama, initial_std
from trainer.models.llama.plan import BLOCKS, TENSOR_PARALLEL
from trainer.optim import Optimizer
from trainer.parallel import compile
from trainer.parallel.compile import build_sum_losses
from trainer.parallel.mesh import Mesh, build_mesh
from trainer.parallel.overlap.arrange import PLAIN, Overlap, arrange
from trainer.parallel.overlap.bucket import merge
from trainer.parallel.overlap.find import find_collectives
from trainer.parallel.overlap.reorder import reorder
from trainer.parallel.parallelize import Layout, initialize, parallelize
from trainer.parallel.partition import Partition
from trainer.parallel.simple_fsdp import Precision
from trainer.parallel.tensor import build_loss

FLOAT32 = Precision(torch.float32, torch.float32)
BLOCK = Overlap("block", True)
# On four ranks gloo adds the parts of a merged buffer in another order.
RELATIVE = 1e-5
STEPS = 3
aten, ops = torch.ops.aten, torch.ops._c10d_functional


@dataclasses.dataclass(frozen=True)
class Case:
    replicate: int = 1
    shard: int = 1
    tp: int = 1
    tied: bool = False
    regather: bool = True
    recompute: tuple[str, str] = ("none", "")
    odd: str = ""
    layers: int = 3
    overlaps: tuple[Overlap, ...] = (BLOCK,)


class Empty(nn.Module):
    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


def make_odd(model: nn.Module, how: str) -> None:
    """Change a model that is parallelized and has its values.

    Freeze a layer and a weight; use a block twice; use a weight in two blocks, one of them beside a block without any.
    """
    if how == "frozen":
        model.layers["1"].requires_grad_(False)
        model.tok_embeddings.requires_grad_(False)
    if how == "twice":
        model.layers["2"] = model.layers["0"]
    if how == "shared and empty":
        model.layers["1"] = Empty()
        model.layers["2"].attention.wq = model.layers["0"].attention.wq


class Trainee:
    """A small Llama, traced once. Copies of its graphs, as `arrange` leaves them, take turns to be its step."""

    def __init__(self, case: Case, mesh: Mesh) -> None:
        shape = dataclasses.replace(SHAPE, tie_embeddings=case.tied, n_layers=case.layers)
        with torch.device("meta"):
            self.model = Llama(shape)
        parallelize(self.model, mesh, Layout(TENSOR_PARALLEL, BLOCKS, FLOAT32, *case.recompute))
        initialize(self.model, torch.device("cpu"), initial_std(shape), seed=0)
        make_odd(self.model, case.odd)
        self.first = {name: p.to_local().detach().clone() for name, p in self.model.named_parameters()}
        self.case, self.mesh, self.recorder = case, mesh, Recorder(mesh.axis_of_group())
        self.running: list[GraphModule] = []
        directions = itertools.count()

        def take_turns(gm: GraphModule, inputs: Any) -> Callable[..., Any]:
            """Stand for the backend: run whatever is now the graph of this direction."""
            direction = next(directions)
            return make_boxed_func(lambda *args: (self.running or self.recorder.graphs)[direction](*args))

        with patch.object(compile, "boxed_nop", take_turns):
            self.sum_losses = build_sum_losses(
                self.model,
                build_loss(sum_token_losses, mesh, vocab_size=257, uncounted=UNCOUNTED, loss_parallel=True),
                enable=True,
                backend="aot_eager",
                loss_inside=True,
                partition=Partition(case.regather),
                report=self.recorder,
            )
            self.loss_of(0).backward()

    def loss_of(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + self.mesh.data_rank)
        tokens_BT = torch.randint(0, 257, (2, 17), generator=generator)
        return self.sum_losses(tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()) / 64

    def train(self, overlap: Overlap) -> dict[str, Any]:
        """Train some steps from the first weights; return losses, weights and which collectives a step had."""
        self.running = [copy_graph(gm) for gm in self.recorder.graphs]
        for gm in self.running:
            arrange(gm, self.mesh.axis_of_group(), overlap)
            gm.graph.lint()
            gm.recompile()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.to_local().copy_(self.first[name])
                p.grad = None
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        optimizer = Optimizer(parameters, name="AdamW", weight_decay=0.1, no_decay=())
        losses = []
        for step in range(STEPS):
            loss = self.loss_of(step)
            loss.backward()
            optimizer.step(0.01, torch.zeros(()))
            for p in self.model.parameters():
                p.grad = None
            losses.append(loss.item())
        return {
            "losses": losses,
            "weights": {name: p.detach().full_tensor() for name, p in self.model.named_parameters()},
            "collectives": [
                # Ranks of tp may hold different parts of 257 rows; data ranks move the same bytes, padded.
                (c.kind, c.axis, c.op, c.modules, c.bytes_in if self.case.tp == 1 else 0)
                for gm in self.running
                for c in find_collectives(gm, self.mesh.axis_of_group())
            ],
        }


def train_each(rank: int, cases: list[Case]) -> list[list[dict[str, Any]]]:
    results = []
    for case in cases:
        torch._dynamo.reset()
        mesh = mesh_of(case.replicate, case.shard, case.tp)
        trainee = Trainee(case, mesh)
        results.append([trainee.train(overlap) for overlap in (PLAIN, *case.overlaps)])
    return results


@functools.cache
def mesh_of(replicate: int, shard: int, tp: int) -> Mesh:
    return build_mesh(torch.device("cpu"), dp_replicate=replicate, dp_shard=shard, tp=tp)


def check_ranks_agree(per_rank: list[list[dict[str, Any]]]) -> None:
    """257 rows are uneven over any ranks, so the last rank's graph pads; the collectives must be the same, in order."""
    first, *others = [[result["collectives"] for result in results] for results in per_rank]
    for other in others:
        assert other == first
    plain, *arranged = first
    assert len(arranged[0]) < len(plain)


TWO_RANKS = [
    Case(shard=2, overlaps=(BLOCK, Overlap("block", False), Overlap("none", True))),
    Case(shard=2, tied=True, regather=False, overlaps=(Overlap("block", True, modules=("*+layers.*",)),)),
    Case(replicate=2),
    Case(shard=2, odd="frozen", recompute=("full", "")),
    Case(shard=2, odd="twice", recompute=("selective", "op")),
    Case(shard=2, odd="shared and empty", overlaps=(BLOCK, Overlap("none", True))),
]
# Two blocks have both a neighbour before and one after; of three, as above, one is in the middle.
FOUR_RANKS = [
    Case(replicate=2, shard=2, recompute=("full", ""), layers=2),
    Case(shard=2, tp=2, layers=2),
    Case(shard=4, tied=True, layers=2),
]


@pytest.mark.slow
def test_on_two_ranks_merged_and_reordered_graphs_compute_the_same_bits() -> None:
    per_rank = run_ranks(train_each, 2, TWO_RANKS, timeout_seconds=400)
    for case, *seen in zip(TWO_RANKS, *per_rank, strict=True):
        check_ranks_agree(seen)
        for plain, *arranged in seen:
            for result in arranged:
                assert result["losses"] == plain["losses"], case
                for name, weight in plain["weights"].items():
                    assert torch.equal(weight, result["weights"][name]), (case, name)


@pytest.mark.slow
def test_on_four_ranks_only_the_order_of_sums_differs() -> None:
    per_rank = run_ranks(train_each, 4, FOUR_RANKS, timeout_seconds=500)
    for case, *seen in zip(FOUR_RANKS, *per_rank, strict=True):
        check_ranks_agree(seen)
        for plain, *arranged in seen:
            for result in arranged:
                torch.testing.assert_close(result["losses"], plain["losses"], rtol=RELATIVE, atol=0.0, msg=str(case))
                for name, weight in plain["weights"].items():
                    torch.testing.assert_close(
                        result["weights"][name], weight, rtol=RELATIVE, atol=RELATIVE, msg=f"{case} {name}"
                    )


def test_a_merged_gather_copies_each_weight_once_and_a_merged_sum_copies_no_result() -> None:
    graphs = trace(shard=4).arranged(BLOCK)
    gather = next(c for c in graphs.collectives("forward") if len(c.modules) == 9)
    targets = [node.target for node in gather.copy_out()]
    assert targets.count(aten.reshape.default) == 9
    assert not {aten.cat.default, aten.clone.default} & set(targets)
    assert targets.count(aten.split_with_sizes.default) == 1
    scatter = next(c for c in graphs.collectives("backward") if c.serves == "gradient" and len(c.modules) == 9)
    views = {aten.split_with_sizes.default, operator.getitem, aten.view.default}
    assert {node.target for node in scatter.copy_out()} == views


def test_the_sum_over_replicas_takes_the_buffer_that_the_scatter_leaves() -> None:
    graphs = trace(replicate=2, shard=2).arranged(BLOCK)
    scatters = {c.wait for c in graphs.collectives("backward") if c.serves == "gradient"}
    sums = graphs.collectives("backward", "dp_replicate")
    assert len(sums) == len(scatters) == 3 + 2
    assert {c.start.args[0] for c in sums} == scatters


def test_a_weight_divided_by_columns_is_copied_out_once() -> None:
    graphs = trace(shard=2, tp=2).arranged(BLOCK)
    gather = next(c for c in graphs.collectives("forward") if len(c.modules) == 9)
    targets = [node.target for node in gather.copy_out()]
    assert targets.count(aten.reshape.default) == 9
    assert targets.count(aten.permute.default) > 0
    assert not {aten.split.Tensor, aten.cat.default} & set(targets)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_new_nodes_know_module_and_value(direction: str) -> None:
    graphs = trace(replicate=2, shard=2).arranged(BLOCK)
    for node in getattr(graphs, direction).graph.nodes:
        if node.op == "call_function":
            assert "val" in node.meta, node
    labels = {
        c.module.split(".")[0] for axis in ("dp_shard", "dp_replicate") for c in graphs.collectives(direction, axis)
    }
    assert {"tok_embeddings", "layers"} <= labels


def test_collectives_of_tensor_parallelism_stay_as_they_are() -> None:
    plain = trace(shard=2, tp=2)
    merged = plain.arranged(BLOCK)
    for direction in ("forward", "backward"):
        before, after = ([(c.kind, c.bytes_in) for c in g.collectives(direction, "tp")] for g in (plain, merged))
        assert sorted(before) == sorted(after)


def merge_by_hand(shapes: list[tuple[int, ...]], ranks: int) -> tuple[GraphModule, list[torch.Tensor]]:
    """Return a graph that gathers a shard of each shape, merged, and the shards."""
    graph, mode = Graph(), FakeTensorMode()
    shards = [torch.arange(float(math.prod(shape))).view(shape) + index for index, shape in enumerate(shapes)]
    waits = []
    for index, shard in enumerate(shards):
        node = graph.placeholder(f"primals_{index}")
        node.meta["val"] = mode.from_tensor(shard)
        for target, args in ((ops.all_gather_into_tensor.default, (ranks, "0")), (ops.wait_tensor.default, ())):
            before, node = node, graph.call_function(target, (node, *args))
            with mode:
                node.meta["val"] = target(before.meta["val"], *args)
        waits.append(node)
    graph.output(tuple(waits))
    gm = GraphModule({}, graph)
    merge(gm, find_collectives(gm, {"0": "dp_shard"}))
    reorder(gm, [], overlap=False)
    gm.graph.lint()
    gm.recompile()
    return gm, shards


@pytest.mark.parametrize("shapes", [[(2, 3), (5,)], [(1, 4), (1,), (1, 2, 3)], [(3, 1), (0, 2), (1, 1)]], ids=str)
def test_merged_weights_are_whole_and_contiguous(shapes: list[tuple[int, ...]]) -> None:
    gm, shards = merge_by_hand(shapes, ranks=3)
    (gather,) = (node for node in gm.graph.nodes if node.target is ops.all_gather_into_tensor.default)
    gather.target = lambda x, ranks, group: torch.cat([x + 100 * rank for rank in range(ranks)])
    (wait,) = gather.users
    wait.target = torch.clone
    gm.recompile()
    for shard, weight in zip(shards, gm(*shards), strict=True):
        assert torch.equal(weight, torch.cat([shard + 100 * rank for rank in range(3)]))
        assert weight.is_contiguous()
