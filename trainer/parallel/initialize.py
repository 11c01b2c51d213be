"""First values of weights: a function of (seed, parameter name, index in the whole tensor), and of nothing else.

Every mesh therefore starts from bit-identical weights, and a rank draws its own shard alone. Only integer operations,
table look-ups and single multiplications and additions are used: each is exact or rounded once, so an element's value
can't depend on where it lies in a vector register, as that of a sine or logarithm may.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from itertools import pairwise
from statistics import NormalDist

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.optim import like_parameter
from trainer.parallel.parameters import replace_parameters

CUT = 3.0  # standard deviations at which the normal distribution is cut off
TABLE_BITS = 12
FRACTION_BITS = 40
CHUNK = 1 << 20  # elements drawn at once, to bound the memory of intermediate values


@functools.cache
def _quantiles() -> Tensor:
    """Quantiles of the normal distribution cut at +-CUT, scaled to unit variance, at 2**TABLE_BITS + 1 even steps."""
    normal = NormalDist()
    low = normal.cdf(-CUT)
    size = 1 << TABLE_BITS
    points = [normal.inv_cdf(low + (1 - 2 * low) * i / size) for i in range(size + 1)]
    # Variance of the linear interpolation between neighbours a and b: (a*a + a*b + b*b) / 3, averaged.
    neighbours = pairwise(points)
    variance = sum(a * a + a * b + b * b for a, b in neighbours) / (3 * size)
    return torch.tensor(points, dtype=torch.float64) / variance**0.5


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift int64 as if unsigned."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits as the unsigned `value`."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _scramble(index: Tensor, key: int) -> Tensor:
    """Return 64 bits for each index: the output function of SplitMix64 (Steele et al., OOPSLA 2014), key by key."""
    bits = index * _signed(0x9E3779B97F4A7C15) + _signed(key)
    bits = (bits ^ _shift_right(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ _shift_right(bits, 31)


def draw_normal(index: Tensor, seed: int, name: str) -> Tensor:
    """Return a float64 draw of unit variance, cut at about +-3, for each int64 index into the parameter `name`."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big")
    bits = _scramble(index, key)
    table = _quantiles().to(index.device)
    cell = _shift_right(bits, 64 - TABLE_BITS)
    fraction = (bits & ((1 << FRACTION_BITS) - 1)).double() / (1 << FRACTION_BITS)
    low = table[cell]
    return low + (table[cell + 1] - low) * fraction


def _fill(shard: Tensor, parameter: DTensor, std: float, seed: int, name: str) -> None:
    """Write this rank's part of the initial values of `parameter` into `shard`, some rows at a time."""
    if std == 0.0:
        shard.fill_(1.0)
        return
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    rows, columns = shard.shape
    across = offset[1] + torch.arange(columns, device=shard.device)
    step = max(1, CHUNK // max(1, columns))
    for start in range(0, rows, step):
        down = offset[0] + torch.arange(start, min(start + step, rows), device=shard.device)
        index = down.unsqueeze(1) * parameter.shape[1] + across
        shard[start : start + step] = draw_normal(index, seed, name) * std


def materialize(model: nn.Module, device: torch.device, std: Mapping[str, float], seed: int) -> None:
    """Give every parameter of `model`, a meta DTensor, memory on `device` and its initial values. Changes `model`."""

    def draw(name: str, parameter: nn.Parameter) -> nn.Parameter:
        assert isinstance(parameter, DTensor)
        shard = torch.empty_like(parameter.to_local(), device=device, requires_grad=False)
        _fill(shard, parameter, std[name], seed, name)
        return nn.Parameter(like_parameter(shard, parameter), requires_grad=parameter.requires_grad)

    replace_parameters(model, draw)
