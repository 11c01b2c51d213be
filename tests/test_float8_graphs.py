"""Graphs of float8 steps, read for dtypes, bytes, casts and collectives."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from overlap_graphs import SHAPE, Graphs, trace
from torch.fx import GraphModule, Node

from trainer.models.llama.config import linear_layers
from trainer.parallel.float8.apply import Float8
from trainer.parallel.overlap.arrange import Overlap, join_scales
from trainer.parallel.overlap.cost import count_flops
from trainer.parallel.overlap.find import CASTS, LAYOUTS, Collective, find_collectives
from trainer.parallel.overlap.hardware import HARDWARE, find_hardware

aten = torch.ops.aten
EVEN = dataclasses.replace(SHAPE, n_layers=2, ffn_dim=48)
LAYERS = frozenset(name for name in linear_layers(EVEN) if name != "output")
GATHERED = Float8(LAYERS, "tensorwise", gather=True)
BLOCK = Overlap("block", reorder=True)


def gathers(graphs: Graphs, direction: str) -> list[Collective]:
    return [c for c in graphs.collectives(direction) if c.serves == "weight" and c.dtype == torch.uint8]


def scales(gm: GraphModule, graphs: Graphs) -> list[Collective]:
    return [c for c in find_collectives(gm, graphs.axes) if c.serves == "scale"]


def nodes_between(node: Node, target: object) -> list[Node]:
    """Return what leads from `node` to calls of `target`, or is kept: by first arguments, layouts and casts alone."""
    found, ahead = [], list(node.users)
    while ahead:
        user = ahead.pop()
        if user.target is not target and user.op != "output":
            assert user.target in LAYOUTS | CASTS | {aten.mul.Tensor}, user.target
            found.append(user)
            ahead += user.users
    return found


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_gather_carries_a_byte_an_element_and_feeds_the_matmul_without_a_cast(direction: str, tp: int) -> None:
    graphs = trace(shape=EVEN, shard=2, tp=tp, float8=GATHERED)
    found = gathers(graphs, direction)
    assert {c.module for c in found} == LAYERS
    assert len(found) == len(LAYERS)
    for c in found:
        outputs, inputs = linear_layers(EVEN)[c.module]
        assert c.bytes_out == outputs * inputs // tp
        assert_cast_once(c)


def assert_cast_once(c: Collective) -> None:
    """Assert that what travels was cast from bfloat16 just before, and is not cast after."""
    shard = c.start.args[0]
    while shard.target is not aten.view.dtype:
        assert shard.target in LAYOUTS
        shard = shard.args[0]
    cast = shard.args[0]
    assert cast.target in CASTS
    assert cast.meta["val"].dtype == torch.float8_e4m3fn
    assert cast.args[0].meta["val"].dtype == torch.bfloat16
    between = nodes_between(c.wait, aten._scaled_mm.default)
    assert not any(node.target in CASTS or node.target is aten.mul.Tensor for node in between)


def sequence_gathers(graphs: Graphs, direction: str) -> dict[str, Collective]:
    """Return the gathers along the sequence over `tp` that carry float8, by module."""
    found = [c for c in graphs.collectives(direction, "tp") if c.kind == "all_gather" and c.dtype == torch.uint8]
    assert len({c.module for c in found}) == len(found)
    return {c.module: c for c in found}


READERS = [f"layers.{i}.{part}" for i in range(EVEN.n_layers) for part in ("attention", "feed_forward")]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_are_cast_once_and_gathered_once_for_all_layers_that_read_them(recompute: str) -> None:
    graphs = trace(shape=EVEN, tp=2, float8=Float8(LAYERS, "tensorwise"), recompute=(recompute, ""))
    found = sequence_gathers(graphs, "forward")
    assert list(found) == READERS
    for c in found.values():
        assert c.bytes_in == 16 // 2 * EVEN.dim
        assert_cast_once(c)
    again = sequence_gathers(graphs, "backward")
    assert sorted(again) == (READERS if recompute == "full" else [])
    assert all(c.bytes_in == 16 // 2 * EVEN.dim for c in again.values())
    # The largest magnitudes, of the weights and of what is gathered, are agreed on once.
    numbers = {
        direction: [c for c in graphs.collectives(direction, "tp") if c.op == "max" and c.bytes_in == 4]
        for direction in ("forward", "backward")
    }
    assert len(numbers["forward"]) == len(LAYERS) + len(READERS)
    assert not numbers["backward"]
    # What is summed and split in backward is in the compute dtype.
    scattered = [c for c in graphs.collectives("backward", "tp") if c.kind == "reduce_scatter"]
    assert {c.dtype for c in scattered} == {torch.bfloat16}
    assert {c.module for c in scattered} >= set(READERS)


def test_activations_are_gathered_in_bfloat16_where_one_reader_is_not_float8_or_rows_have_scales() -> None:
    without_wk = LAYERS - {"layers.0.attention.wk"}
    found = sequence_gathers(trace(shape=EVEN, tp=2, float8=Float8(without_wk, "tensorwise")), "forward")
    assert list(found) == [name for name in READERS if name != "layers.0.attention"]
    for recipe in ("rowwise", "rowwise_with_gw_hp"):
        graphs = trace(shape=EVEN, tp=2, float8=Float8(LAYERS, recipe))
        assert not sequence_gathers(graphs, "forward")
    head = trace(shape=EVEN, tp=2, float8=Float8(LAYERS | {"output"}, "tensorwise"))
    assert [name for name in sequence_gathers(head, "forward") if name not in READERS] == ["output"]


def test_without_the_float8_gather_bfloat16_travels_and_is_cast_after() -> None:
    graphs = trace(shape=EVEN, shard=2, float8=Float8(LAYERS, "tensorwise"))
    assert not gathers(graphs, "forward")
    c = next(c for c in graphs.collectives("forward") if c.module == "layers.0.attention.wo" and c.serves == "weight")
    assert c.dtype == torch.bfloat16
    between = nodes_between(c.wait, aten._scaled_mm.default)
    assert sum(node.target in CASTS for node in between) == 1


def test_rowwise_scales_cast_a_weight_twice_along_different_dims() -> None:
    """Why a rowwise weight is not gathered in float8: output and input gradient want other casts of it."""
    graphs = trace(shape=EVEN, shard=2, float8=Float8(LAYERS, "rowwise"))
    shapes = []
    for direction in ("forward", "backward"):
        c = next(c for c in graphs.collectives(direction) if c.module == "layers.0.feed_forward.w1")
        assert c.dtype == torch.bfloat16
        gm = getattr(graphs, direction)
        amaxes = [n for n in gm.graph.nodes if n.target is aten.amax.default and _comes_from(n, c.wait)]
        shapes.append({tuple(n.meta["val"].shape) for n in amaxes})
    outputs, inputs = linear_layers(EVEN)["layers.0.feed_forward.w1"]
    assert shapes == [{(outputs, 1)}, {(inputs, 1)}]


def _comes_from(node: Node, source: Node) -> bool:
    while node is not source and node.target in LAYOUTS | CASTS | {aten.abs.default, aten.amax.default}:
        node = node.all_input_nodes[0]
    return node is source


@pytest.mark.parametrize("tp", [1, 2])
def test_scales_are_found_once_a_step_and_in_one_collective_where_asked(tp: int) -> None:
    graphs = trace(shape=EVEN, shard=2, tp=tp, float8=GATHERED)
    assert len(scales(graphs.forward, graphs)) == len(LAYERS) * tp
    assert not scales(graphs.backward, graphs)
    copy = graphs.arranged(Overlap())
    join_scales(copy.forward, copy.axes)
    copy.forward.graph.lint()
    joined = scales(copy.forward, copy)
    assert len(joined) == tp  # one for each axis
    assert {c.bytes_in for c in joined} == {4 * len(LAYERS)}


def test_float8_and_bfloat16_weights_are_bucketed_beside_each_other() -> None:
    graphs = trace(shape=EVEN, shard=2, float8=GATHERED).arranged(BLOCK)
    for direction, blocks in (("forward", 2), ("backward", 2)):
        found = gathers(graphs, direction)
        assert len(found) == blocks
        assert [len(c.modules) for c in found] == [7, 7]
    plain = trace(shape=EVEN, shard=2).arranged(BLOCK)
    sums = [c for c in plain.collectives("backward") if c.serves == "gradient"]
    with_float8 = [c for c in graphs.collectives("backward") if c.serves == "gradient"]
    assert [c.bytes_in for c in with_float8] == [c.bytes_in for c in sums]
    assert all(c.dtype == torch.float32 for c in with_float8)


def test_kept_weights_are_kept_in_float8() -> None:
    graphs = trace(shape=EVEN, shard=2, float8=GATHERED, regather=False)
    assert not gathers(graphs, "backward")
    kept = [node.meta.get("val") for node in graphs.backward.graph.find_nodes(op="placeholder")]
    sizes = [v.numel() for v in kept if isinstance(v, torch.Tensor) and v.dtype in (torch.uint8, torch.float8_e4m3fn)]
    assert sum(sizes) >= sum(o * i for name, (o, i) in linear_layers(EVEN).items() if name in LAYERS)


def test_a_float8_matmul_is_priced_at_the_float8_peak() -> None:
    graphs = trace(shape=EVEN, shard=2, float8=GATHERED)
    (first, *_) = graphs.forward.graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
    assert count_flops(first) == 2 * 16 * 32 * 32
    h100 = HARDWARE["H100"]
    assert h100.matmul_flops(torch.float8_e4m3fn) == pytest.approx(2 * h100.matmul_flops(torch.bfloat16), rel=1e-3)
    with pytest.raises(ValueError, match=r"A100.*H100, H200, B200"):
        find_hardware("A100", float8=True)
