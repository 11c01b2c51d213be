"""Which collectives share a bucket."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from overlap_graphs import LLAMA_8B, SHAPE, copy_graph, trace
from torch.fx import Graph

from trainer.parallel.overlap.arrange import Overlap, move_gathers, plan
from trainer.parallel.overlap.find import Collective, find_collectives
from trainer.parallel.overlap.plan import MAX_BUCKET_BYTES, check_patterns, match, plan_by_block, plan_by_modules

ops = torch.ops._c10d_functional
ONE_BLOCK = dataclasses.replace(SHAPE, n_layers=1)


def gather(
    module: str, *, dtype: torch.dtype = torch.bfloat16, group: str = "0", size: int = 2, **facts: Any
) -> Collective:
    graph = Graph()
    start = graph.call_function(ops.all_gather_into_tensor.default, (graph.placeholder("primals_1"), 2, group))
    wait = graph.call_function(ops.wait_tensor.default, (start,))
    known = {"serves": "weight", "modules": (module,)} | facts
    return Collective("all_gather", "dp_shard", dtype, size // 2, size, module, start, wait, **known)


def modules(buckets: list[Any]) -> list[list[str]]:
    return [[c.module for c in bucket.collectives] for bucket in buckets]


def test_a_block_is_a_bucket_and_so_is_each_end() -> None:
    names = ["tok_embeddings", "layers.0.wq", "layers.0.w1", "layers.1.wq", "layers.1.w1", "norm", "output"]
    expected = [["tok_embeddings"], ["layers.0.wq", "layers.0.w1"], ["layers.1.wq", "layers.1.w1"], ["norm", "output"]]
    assert modules(plan_by_block([gather(name) for name in names], "layers.*")) == expected
    backward = [gather(name) for name in reversed(names)]
    assert sorted(modules(plan_by_block(backward, "layers.*"))) == sorted(
        [list(reversed(bucket)) for bucket in expected]
    )


def test_alternating_dtypes_and_groups_form_one_bucket_each() -> None:
    kinds = [(torch.bfloat16, "0"), (torch.float32, "0"), (torch.bfloat16, "1")] * 3
    collectives = [gather("layers.0.w", dtype=dtype, group=group) for dtype, group in kinds]
    buckets = plan_by_block(collectives, "layers.*")
    assert [len(bucket.collectives) for bucket in buckets] == [3, 3, 3]
    assert len({bucket.stage for bucket in buckets}) == 1
    for bucket in buckets:
        assert len({(c.dtype, c.group) for c in bucket.collectives}) == 1


def test_other_axes_activations_and_sums_of_sums_never_join() -> None:
    collectives = [gather("layers.0.a"), gather("layers.0.b", serves=""), gather("layers.0.c")]
    assert modules(plan_by_block(collectives, "layers.*")) == [["layers.0.a", "layers.0.c"]]
    sums = [gather("layers.0.a", serves="gradient", sums_before=level) for level in (0, 1, 0, 1)]
    assert [len(bucket.collectives) for bucket in plan_by_block(sums, "layers.*")] == [2, 2]


def test_a_module_that_comes_back_later_does_not_hold_its_bucket_open() -> None:
    names = ["layers.0.w", "layers.1.w", "layers.0.v", "layers.1.v", "layers.2.w", "layers.3.w", "layers.0.w"]
    assert modules(plan_by_block([gather(name) for name in names], "layers.*")) == [
        ["layers.0.w", "layers.0.v"],
        ["layers.1.w", "layers.1.v"],
        ["layers.2.w"],
        ["layers.3.w"],
        ["layers.0.w"],
    ]


def test_a_bucket_is_bounded_in_bytes() -> None:
    collectives = [gather("layers.0.w", size=MAX_BUCKET_BYTES // 2) for _ in range(5)]
    assert [len(bucket.collectives) for bucket in plan_by_block(collectives, "layers.*")] == [2, 2, 1]


def test_patterns_decide_which_modules_share_a_bucket() -> None:
    names = ["tok_embeddings", "layers.0.w1", "layers.0.w2", "layers.1.w1", "norm", "output"]
    collectives = [gather(name) for name in names]
    buckets = plan_by_modules(collectives, ("tok_embeddings", "layers.*", "norm+output"))
    assert modules(buckets) == [["tok_embeddings"], ["layers.0.w1", "layers.0.w2"], ["layers.1.w1"], ["norm", "output"]]
    assert modules(plan_by_modules(collectives, ("layers.*.w1", "layers.*+norm"))) == [
        ["tok_embeddings"],
        ["layers.0.w1"],
        ["layers.0.w2", "norm"],
        ["layers.1.w1"],
        ["output"],
    ]


def test_a_pattern_matches_a_module_and_all_inside_it_and_nothing_above() -> None:
    assert match("layers.10.attention.wq", "layers.*") == "layers.10"
    assert match("layers.3.attention.wq", "layers.[0-4]") == "layers.3"
    assert match("layers", "layers.*") is None
    assert match("norm", "output+norm") == "output+norm"
    assert match("layers_extra.0", "layers.*") is None


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    names = ["tok_embeddings", "layers.0.attention.wq", "norm", "output"]
    check_patterns(("tok_embeddings", "layers.*", "norm+output"), names)
    with pytest.raises(ValueError, match=r"compile.bucket_modules has 'head'.*layers, norm, output, tok_embeddings"):
        check_patterns(("layers.*", "norm+head"), names)


def test_an_unknown_pattern_stops_compilation() -> None:
    with pytest.raises(Exception, match=r"compile\.bucket_modules has 'blocks"):
        trace(shape=ONE_BLOCK, shard=2, overlap=Overlap("block", True, modules=("blocks.*",)))


def test_bucketing_none_plans_each_collective_alone() -> None:
    graphs = trace(shard=4)
    for direction in ("forward", "backward"):
        collectives = graphs.collectives(direction)
        assert [list(bucket.collectives) for bucket in plan(collectives, Overlap())] == [[c] for c in collectives]


@pytest.mark.slow
def test_over_64_ranks_each_block_has_one_gather_and_one_scatter_a_direction() -> None:
    blocks, ends = 8, 2
    shape = dataclasses.replace(LLAMA_8B, n_layers=blocks)
    graphs = trace(shape=shape, shard=64).arranged(Overlap("block", True))
    forward, backward = ([c.kind for c in graphs.collectives(direction)] for direction in ("forward", "backward"))
    assert Counter(forward) == {"all_gather": blocks + ends}
    # The embedding's gradient needs no weight.
    assert Counter(backward) == {"all_gather": blocks + ends - 1, "reduce_scatter": blocks + ends}
    by_block = Counter(c.modules[0].split(".")[1] for c in graphs.collectives("forward") if len(c.modules) == 9)
    assert by_block == {str(block): 1 for block in range(blocks)}


def test_replicas_sum_each_block_once() -> None:
    sums = trace(replicate=4).arranged(Overlap("block", True)).collectives("backward", "dp_replicate")
    assert [(c.kind, len(c.modules)) for c in sums] == [("all_reduce", n) for n in (2, 9, 9, 9, 1)]


def test_gathers_of_weights_move_to_the_second_group_and_nothing_else_does() -> None:
    graphs = trace(shard=2)
    (group,) = {c.group for c in graphs.collectives("backward")}
    axes = dict(graphs.axes) | {"second": "dp_shard"}
    for gm in (graphs.forward, graphs.backward):
        copy = copy_graph(gm)
        move_gathers(copy, {group: "second"})
        for c in find_collectives(copy, axes):
            assert c.group == ("second" if c.kind == "all_gather" else group)
