"""The norm of all gradients against float64, and clipping by it."""

import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer.parallel.gradients import clip_gradients
from trainer.parallel.mesh import build_mesh

# Float32 sums of rows, then of their norms; PyTorch's one long sum is off by 1e-4 here.
RELATIVE = 1e-6


def clip(rank: int, max_norm: float) -> tuple[float, float, float]:
    mesh = build_mesh(torch.device("cpu"), dp_replicate=1, dp_shard=2)
    generator = torch.Generator().manual_seed(rank)
    parameters, squares = [], torch.zeros((), dtype=torch.float64)
    for shape, placement in (((2000, 1000), Shard(0)), ((5,), Shard(0)), ((0, 7), Shard(0)), ((3, 4), Replicate())):
        placements = [Replicate(), placement, Replicate()]
        part = torch.ones(shape) if placement == Replicate() else torch.randn(shape, generator=generator)
        whole = DTensor.from_local(part, mesh.storage, placements, run_check=False)
        parameter = nn.Parameter(whole)
        parameter.grad = whole.clone()
        parameters.append(parameter)
        squares += part.double().square().sum() / (2 if placement == Replicate() else 1)
    expected = mesh.sum(squares).sqrt().item()
    norm = clip_gradients(parameters, max_norm, mesh).item()
    after = clip_gradients(parameters, float("inf"), mesh).item()
    return norm, expected, after


def test_the_norm_is_that_of_all_shards_with_copies_counted_once() -> None:
    for norm, expected, after in run_ranks(clip, 2, 1e9):
        assert abs(norm - expected) < RELATIVE * expected
        assert abs(after - expected) < RELATIVE * expected


def test_gradients_above_the_limit_are_scaled_to_it() -> None:
    for norm, expected, after in run_ranks(clip, 2, 3.0):
        assert abs(norm - expected) < RELATIVE * expected
        assert abs(after - 3.0) < 1e-5
