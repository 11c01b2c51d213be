"""The gather along the sequence before tensor-parallel layers, in float8: cast once, with one scale, before it travels.

The scale is that of the whole sequence, the largest magnitude over all ranks of `tp`, so the bits are those of a cast
after the gather, and all layers that multiply the input take the same bytes. The gradient is summed and split in the
compute dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.parallel.float8.cast import E4M3, cast
from trainer.parallel.float8.gather import agree_on_scale
from trainer.parallel.float8.matmul import Operand
from trainer.parallel.tensor import SEQUENCE, Axis, all_gather, reduce_scatter


def gather_in_float8(x_BTD: Tensor, axis: Axis) -> Operand:
    """Collective over `tp`, backward too. Return the whole sequence of all ranks' parts, in float8."""
    part_BTD = x_BTD.detach()
    scale = agree_on_scale(part_BTD, (axis.group,))
    values = all_gather(cast(part_BTD, scale).view(torch.uint8), SEQUENCE, axis).view(E4M3)
    return Operand(_TakesGradient.apply(x_BTD, axis), scale, values)


class _TakesGradient(torch.autograd.Function):
    """A tensor of the whole sequence's shape, without memory of its own, whose gradient is the whole sequence's."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        rows, tokens, width = x_BTD.shape
        return x_BTD.new_zeros(()).expand(rows, tokens * axis.size, width)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad_BTD, SEQUENCE, ctx.axis), None
