"""Seconds of nodes and collectives against arithmetic done by hand, on hardware with round numbers."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from trainer.parallel.overlap.cost import Priced, Ring, collective_seconds, count_flops, price
from trainer.parallel.overlap.hardware import HARDWARE, Hardware, Link, find_hardware

aten = torch.ops.aten
ROUND = Hardware(
    name="round",
    bfloat16_flops=1e12,
    float32_flops=1e11,
    matmul_efficiency=0.5,
    attention_efficiency=0.25,
    memory_bytes_per_second=1e9,
    memory_efficiency=1.0,
    memory_bytes=1e9,
    step_efficiency=1.0,
    kernel_seconds=1e-9,
    collective_seconds=1e-3,
    intra_node=Link(1e9, 1e-4),
    inter_node=Link(1e8, 1e-3),
    ranks_per_node=8,
    source="a test",
)


def graph_of(function: Callable[..., object], *inputs: Tensor, fuse: bool = False) -> GraphModule:
    return make_fx(function, select_decomp_table() if fuse else None, tracing_mode="fake")(*inputs)


def price_of(function: Callable[..., object], *inputs: Tensor, fuse: bool = False) -> Priced:
    return price(graph_of(function, *inputs, fuse=fuse), {}, {}, ROUND, fuse=fuse)


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def test_a_large_matmul_takes_its_operations_and_a_thin_one_its_bytes() -> None:
    fast_memory = dataclasses.replace(ROUND, memory_bytes_per_second=1e15)
    gm = graph_of(torch.mm, bf16(64, 128), bf16(128, 32))
    assert price(gm, {}, {}, fast_memory, fuse=False).compute_seconds() == pytest.approx(2 * 64 * 128 * 32 / 0.5e12)
    assert price_of(torch.mm, bf16(64, 128), bf16(128, 1)).compute_seconds() == pytest.approx(
        2 * (64 * 128 + 128 + 64) / 1e9
    )


def test_operations_are_counted_as_torch_counts_them() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def step(x: Tensor, w: Tensor, q: Tensor) -> Tensor:
        attended = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        return (x @ w).sum() + torch.bmm(q[0], q[0].mT).sum() + attended.sum()

    inputs = torch.randn(6, 10), torch.randn(10, 4), torch.randn(2, 3, 8, 16)
    with FlopCounterMode(display=False) as counter:
        step(*inputs)
    graph = graph_of(step, *inputs).graph
    attention = 2 * 2 * 2 * 3 * 8 * 8 * 16  # the counter doesn't know the CPU's attention
    assert sum(map(count_flops, graph.nodes)) == counter.get_total_flops() + attention


def test_a_causal_attention_computes_half_and_its_backward_two_and_a_half_times_as_much() -> None:
    def step(q: Tensor) -> tuple[Tensor, ...]:
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return torch.autograd.grad(out.sum(), q)

    graph = graph_of(step, torch.randn(2, 3, 8, 16, requires_grad=True)).graph
    forward, backward = [flops for node in graph.nodes if (flops := count_flops(node))]
    assert (forward, backward) == (2 * 2 * 3 * 8 * 8 * 16, 5 * 2 * 3 * 8 * 8 * 16)


def test_views_are_free() -> None:
    priced = price_of(lambda x: x.view(4, 2, 8).transpose(0, 1)[:1].unsqueeze(0), torch.empty(8, 8))
    assert priced.compute_seconds() == 0


def test_pointwise_operations_cost_their_bytes_each_and_once_when_fused() -> None:
    def chain(x: Tensor) -> Tensor:
        return (x + 1).exp() * 2

    size = 4 * 1000
    x = torch.empty(1000)
    assert price_of(chain, x).compute_seconds() == pytest.approx(3 * 2 * size / 1e9)
    assert price_of(chain, x, fuse=True).compute_seconds() == pytest.approx(2 * size / 1e9)


def test_a_reduction_shares_its_kernel_and_reads_its_input_once() -> None:
    def normalize(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)

    priced = price_of(normalize, torch.empty(50, 1000), fuse=True)
    assert priced.compute_seconds() == pytest.approx(2 * 4 * 50 * 1000 / 1e9)


def test_a_matmul_between_separates_kernels() -> None:
    def two(x: Tensor, w: Tensor) -> Tensor:
        return (x.relu() @ w).relu()

    x, w = torch.empty(100, 100), torch.empty(100, 100)
    priced = price_of(two, x, w, fuse=True)
    kernels = [seconds for node, seconds in priced.seconds.items() if node.target is not aten.mm.default]
    assert kernels == pytest.approx([2 * 4e4 / 1e9, 2 * 4e4 / 1e9])


def test_a_kernel_does_not_need_its_own_result() -> None:
    def around(x: Tensor, w: Tensor) -> Tensor:
        y = x.relu()
        return y @ w + y

    x, w = torch.empty(100, 100), torch.empty(100, 100)
    priced = price_of(around, x, w, fuse=True)
    kernels = [seconds for node, seconds in priced.seconds.items() if node.target is not aten.mm.default]
    assert kernels == pytest.approx([2 * 4e4 / 1e9, 3 * 4e4 / 1e9])


def test_a_ring_inside_a_node_has_a_step_less_than_ranks_and_moves_all_but_its_own_part() -> None:
    expected = 1e-3 + 7 * 1e-4 + 7 / 8 * 8e6 / 1e9
    for kind in ("all_gather", "reduce_scatter"):
        assert collective_seconds(kind, 8_000_000, Ring(8), ROUND) == pytest.approx(expected)
    both = 1e-3 + 2 * (expected - 1e-3)
    assert collective_seconds("all_reduce", 8_000_000, Ring(8), ROUND) == pytest.approx(both)


def test_an_axis_over_nodes_uses_the_cards_of_its_ranks_in_a_node() -> None:
    # 16 ranks side by side: eight cards of 0.1 GB/s per node, and one of 15 steps crosses.
    side_by_side = 1e-3 + 14 * 1e-4 + 1e-3 + 15 / 16 * 16e6 / 0.8e9
    assert collective_seconds("all_gather", 16_000_000, Ring(16), ROUND) == pytest.approx(side_by_side)
    # Every eighth rank: one card, and all steps cross.
    apart = 1e-3 + 15 * 1e-3 + 15 / 16 * 16e6 / 0.1e9
    assert collective_seconds("all_gather", 16_000_000, Ring(16, stride=8), ROUND) == pytest.approx(apart)


def test_every_description_is_complete_and_an_unknown_one_is_refused_with_all_names() -> None:
    for name, hardware in HARDWARE.items():
        assert hardware.name == name
        assert 0 < hardware.matmul_efficiency <= 1
        assert 0 < hardware.attention_efficiency <= hardware.matmul_efficiency
        assert hardware.source
    with pytest.raises(ValueError, match=r"H100.*A100.*CPU"):
        find_hardware("H1000")
