"""Casts to float8 with power-of-two scales, exact integer arithmetic on exponents.

A scale is the largest power of two that keeps the largest magnitude within the format. Multiplying by it and dividing
by it change no significand bit, so what rounding does to a value depends on the scale only where the value falls below
the format's normal range, 2**-15 of the largest and less. Casting twice is casting once. And no compiler can round a
scale differently: there is no division, logarithm or rounding in it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Formats of "FP8 Formats for Deep Learning" (arXiv 2209.05433, table 1): largest values 448 = 1.75 * 2**8 and
# 57344 = 1.75 * 2**15. Values are e4m3; gradients, whose range is wider, may be e5m2.
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST_EXPONENT = {E4M3: 8, E5M2: 15}
SMALLEST_AMAX = 2.0**-40  # a tensor of zeros gets the scale of this one

# The bits of a float32: its exponent, biased by 127, above 23 bits of fraction.
ONE = 1 << 23  # one, in the exponent
EXPONENT = 0xFF * ONE
ABOVE_THREE_QUARTERS = ONE - 1 - 3 * ONE // 4  # carries a fraction above 0.75 into the exponent


class Scale(NamedTuple):
    """A power of two to multiply by before the cast, and its inverse for after; float32, (1, 1) or (rows, 1).

    The inverse is NaN where the largest magnitude isn't finite, and with it all that the scaled values are used for.
    """

    scale: Tensor
    inverse: Tensor


class Scaled(NamedTuple):
    """A float8 matrix, and what to multiply its values by: one number (1, 1), or one for each row (rows, 1)."""

    values: Tensor
    inverse: Tensor


def scale_of(amax: Tensor, dtype: torch.dtype) -> Scale:
    """Return the scale for the largest magnitude `amax`, float32: the largest power of two 2**-k with amax * 2**-k
    within `dtype`.

    With amax = significand * 2**exponent and the format's largest value 1.75 * 2**top, k is exponent - top, and one
    more where the significand is above 1.75.
    """
    bits = amax.clamp(min=SMALLEST_AMAX).view(torch.int32)
    exponent = (bits + ABOVE_THREE_QUARTERS) & EXPONENT
    top = LARGEST_EXPONENT[dtype] * ONE
    inverse = (exponent - top).view(torch.float32)
    scale = (254 * ONE - exponent + top).view(torch.float32)  # 254: twice the bias
    return Scale(scale, inverse + (amax - amax))


def amax_of(x: Tensor, *, by_row: bool = False) -> Tensor:
    """Return the largest magnitude of a matrix as (1, 1), or of each of its rows as (rows, 1); float32."""
    largest = x.abs().amax(dim=-1, keepdim=True) if by_row else x.abs().amax().reshape(1, 1)
    return largest.float()


def cast(x: Tensor, scale: Scale, dtype: torch.dtype = E4M3) -> Tensor:
    """Return `x` times `scale` in float8. Rounds once: the product is exact in the dtype of `x`."""
    return (x * scale.scale.to(x.dtype)).to(dtype)


def scale_and_cast(x: Tensor, dtype: torch.dtype = E4M3, *, by_row: bool = False) -> Scaled:
    """Cast a matrix with a scale of its own, or one for each of its rows."""
    scale = scale_of(amax_of(x, by_row=by_row), dtype)
    return Scaled(cast(x, scale, dtype), scale.inverse)


def restore(x: Scaled, dtype: torch.dtype) -> Tensor:
    """Return the values that `x` stands for; exact in bfloat16 and float32."""
    return x.values.to(dtype) * x.inverse.to(dtype)
