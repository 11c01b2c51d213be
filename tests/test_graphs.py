"""The traced graphs: which collectives there are, in which dtype, and what is kept for backward. No processes."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch.fx import GraphModule

from trainer.distributed import fake_process_group
from trainer.loss import UNCOUNTED, sum_token_losses
from trainer.models.llama.config import DEBUG
from trainer.models.llama.model import Llama, initial_std
from trainer.models.llama.plan import BLOCKS, TENSOR_PARALLEL
from trainer.parallel.compile import build_sum_losses
from trainer.parallel.graph_report import GraphReport
from trainer.parallel.mesh import build_mesh
from trainer.parallel.overlap.find import Collective, find_collectives
from trainer.parallel.parallelize import Layout, initialize, parallelize
from trainer.parallel.partition import Partition
from trainer.parallel.simple_fsdp import Precision
from trainer.parallel.tensor import build_loss

SHAPE = dataclasses.replace(DEBUG, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=50, vocab_size=257)
PARAMETERS = 2 * 9 + 3
ONE_BLOCK = 9 + 3  # parameters of a model of one block, for what no second block changes
BF16, FP32 = torch.bfloat16, torch.float32


class Traced(NamedTuple):
    forward: list[Collective]
    backward: list[Collective]
    kept: list[tuple[int, ...]]  # shapes of tensors that forward keeps for backward
    shards: set[tuple[int, ...]]

    def count(self, direction: str, axis: str) -> dict[tuple[str, torch.dtype], int]:
        return dict(Counter((c.kind, c.dtype) for c in getattr(self, direction) if c.axis == axis))


@dataclasses.dataclass
class Recorder(GraphReport):
    """Also keeps the graphs themselves."""

    graphs: list[GraphModule] = dataclasses.field(default_factory=list)

    def record(self, graphs: Mapping[str, GraphModule], plans: Mapping[str, list[str]]) -> None:
        super().record(graphs, plans)
        self.graphs = list(graphs.values())


def trace(
    *,
    replicate: int = 1,
    shard: int = 1,
    tp: int = 1,
    tied: bool = False,
    regather: bool = True,
    recompute: tuple[str, str] = ("none", ""),
    precision: Precision = Precision(BF16, FP32),  # noqa: B008 - immutable
    vocab_size: int = SHAPE.vocab_size,
    blocks: int = SHAPE.n_layers,
) -> Traced:
    shape = dataclasses.replace(SHAPE, tie_embeddings=tied, vocab_size=vocab_size, n_layers=blocks)
    torch._dynamo.reset()
    with fake_process_group(replicate * shard * tp):
        mesh = build_mesh(torch.device("cpu"), dp_replicate=replicate, dp_shard=shard, tp=tp)
        with torch.device("meta"):
            model = Llama(shape)
        parallelize(model, mesh, Layout(TENSOR_PARALLEL, BLOCKS, precision, *recompute))
        initialize(model, torch.device("cpu"), initial_std(shape), seed=0)
        axes = mesh.axis_of_group()
        recorder = Recorder(axes)
        sum_losses = build_sum_losses(
            model,
            build_loss(sum_token_losses, mesh, vocab_size=vocab_size, uncounted=UNCOUNTED, loss_parallel=True),
            enable=True,
            backend="aot_eager",
            loss_inside=True,
            partition=Partition(regather),
            report=recorder,
        )
        tokens = torch.zeros(3, 16, dtype=torch.int64)
        sum_losses(tokens, tokens)
        forward, backward = recorder.graphs
        output = next(iter(forward.graph.find_nodes(op="output")))
        kept = [node.meta.get("val") for node in output.args[0][1:] if node is not None]
        return Traced(
            find_collectives(forward, axes),
            find_collectives(backward, axes),
            [tuple(value.shape) for value in kept if isinstance(value, torch.Tensor)],
            {tuple(p.to_local().shape) for p in model.parameters()},
        )


def whole_weights() -> set[tuple[int, ...]]:
    """Shapes of whole matrices and of their transposes; no activation of this model has one of them."""
    shapes = {tuple(p.shape) for p in Llama(SHAPE).parameters() if p.ndim == 2}
    return shapes | {shape[::-1] for shape in shapes}


@pytest.mark.parametrize("recompute", [("none", ""), ("full", ""), ("selective", "op"), ("selective", "2")])
def test_with_regather_backward_gathers_again_and_no_whole_weight_is_kept(recompute: tuple[str, str]) -> None:
    traced = trace(shard=4, recompute=recompute)
    assert traced.count("forward", "dp_shard") == {("all_gather", BF16): PARAMETERS}
    backward = traced.count("backward", "dp_shard")
    # The embedding is a lookup, whose gradient needs no weight.
    assert backward == {("all_gather", BF16): PARAMETERS - 1, ("reduce_scatter", FP32): PARAMETERS}
    assert not whole_weights() & set(traced.kept)


@pytest.mark.parametrize("recompute", [("none", ""), ("full", ""), ("selective", "op")])
def test_without_regather_each_parameter_is_gathered_once(recompute: tuple[str, str]) -> None:
    traced = trace(shard=4, regather=False, recompute=recompute)
    assert traced.count("forward", "dp_shard") == {("all_gather", BF16): PARAMETERS}
    assert traced.count("backward", "dp_shard") == {("reduce_scatter", FP32): PARAMETERS}
    assert whole_weights() & set(traced.kept)


def test_a_tied_embedding_is_gathered_once_for_both_uses() -> None:
    traced = trace(shard=4, tied=True, blocks=1)
    assert traced.count("forward", "dp_shard") == {("all_gather", BF16): ONE_BLOCK - 1}


@pytest.mark.parametrize(("param", "reduce"), [(FP32, FP32), (BF16, FP32), (BF16, BF16), (FP32, BF16)])
def test_collectives_have_the_dtypes_asked_for(param: torch.dtype, reduce: torch.dtype) -> None:
    traced = trace(shard=2, precision=Precision(param, reduce), blocks=1)
    assert {c.dtype for c in traced.forward} == {param}
    assert {c.dtype for c in traced.backward if c.kind == "reduce_scatter"} == {reduce}


def test_shards_of_one_element_are_gathered_like_all_others() -> None:
    traced = trace(shard=SHAPE.dim, blocks=1)
    for direction, some in ((traced.forward, ONE_BLOCK), (traced.backward, ONE_BLOCK - 1)):  # not the embedding again
        gathers = [c for c in direction if c.kind == "all_gather"]
        assert [c.serves for c in gathers] == ["weight"] * some
        assert min(c.bytes_in for c in gathers) == BF16.itemsize


def test_replicas_sum_gradients_with_one_all_reduce_each() -> None:
    traced = trace(replicate=4, blocks=1)
    assert traced.forward == []
    assert traced.count("backward", "dp_replicate") == {("all_reduce", FP32): ONE_BLOCK}


@pytest.mark.parametrize("vocab_size", [257, 3], ids=["uneven", "fewer rows than ranks"])
def test_hybrid_sharding_sums_over_replicas_what_the_scatter_leaves(vocab_size: int) -> None:
    traced = trace(replicate=2, shard=4, vocab_size=vocab_size, blocks=1)
    assert traced.count("backward", "dp_shard")["reduce_scatter", FP32] == ONE_BLOCK
    assert traced.count("backward", "dp_replicate") == {("all_reduce", FP32): ONE_BLOCK}
    scattered = sorted(c.bytes_out for c in traced.backward if c.kind == "reduce_scatter")
    assert sorted(c.bytes_in for c in traced.backward if c.axis == "dp_replicate") == scattered


def test_tensor_parallel_ranks_exchange_activations_and_data_ranks_parameters() -> None:
    traced = trace(shard=2, tp=2)
    assert traced.count("forward", "dp_shard") == {("all_gather", BF16): PARAMETERS}
    # Attention, feed-forward and head gather the sequence; embedding, attention and feed-forward scatter their sums.
    borders = {("all_gather", BF16): 2 * 2 + 1, ("reduce_scatter", BF16): 1 + 2 * 2}
    loss = {("all_reduce", FP32): 3}
    assert traced.count("forward", "tp") == borders | loss
    norms = {("all_reduce", FP32): 2 * 2 + 1}
    assert traced.count("backward", "tp").items() >= norms.items()


def test_one_process_communicates_nothing_and_still_computes_in_the_compute_dtype() -> None:
    traced = trace(blocks=1)
    assert traced.forward == traced.backward == []
    assert not whole_weights() & {shape for shape in traced.kept if shape not in traced.shards}


def test_a_collective_knows_its_module_and_bytes() -> None:
    traced = trace(shard=2, blocks=1)
    by_module: dict[str, Any] = {c.module.removeprefix("model."): c for c in traced.forward}
    gather = by_module["layers.0.feed_forward.w1"]
    assert (gather.kind, gather.bytes_in, gather.bytes_out) == ("all_gather", 25 * 32 * 2, 50 * 32 * 2)
    assert {"tok_embeddings", "norm", "output", "layers.0.attention.wq"} <= by_module.keys()
