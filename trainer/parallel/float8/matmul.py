"""A linear layer whose matmuls take float8, forward and backward, by recipe.

Every matmul contracts the last dim of both its operands, so a scale for each row is one along the contracted dim. The
recipes are those of torchao 0.18 (torchao/float8/config.py, Float8LinearRecipeName) and the formats of its operands
too; scales are powers of two in all of them, where torchao's `tensorwise` has others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.parallel.float8.cast import E4M3, E5M2, Scale, Scaled, cast, restore, scale_and_cast


@dataclass(frozen=True)
class Recipe:
    """What is cast how. With `by_row`, one scale for each row along the contracted dim, else one for a tensor."""

    name: str
    by_row: bool
    gradient_dtype: torch.dtype
    is_weight_gradient_float8: bool = True


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("tensorwise", by_row=False, gradient_dtype=E5M2),
        Recipe("rowwise", by_row=True, gradient_dtype=E4M3),
        Recipe("rowwise_with_gw_hp", by_row=True, gradient_dtype=E4M3, is_weight_gradient_float8=False),
    )
}


class Operand(NamedTuple):
    """A weight, or an input, whose one scale is known before its matmul.

    `whole` takes the gradient. It has the values too, unless `values` holds them already in float8: then it has only
    their shape.
    """

    whole: Tensor
    scale: Scale
    values: Tensor | None = None


def multiply(a: Scaled, b: Scaled, dtype: torch.dtype, *, emulate: bool, fast: bool = False) -> Tensor:
    """Return a @ b.T in `dtype`. Contiguous operands, as the float8 kernels of GPUs need them.

    With `fast`, a GPU may accumulate in less than float32, as torchao has it in forward. With `emulate`, the same
    products are summed by an ordinary matmul.
    """
    if emulate:
        return restore(a, dtype) @ restore(b, dtype).t()
    inverse_a, inverse_b = a.inverse, b.inverse
    # Kernels take one scale for both, or one for each row of both. On CPUs those for one scale are some hundred times
    # slower in torch 2.13 (512 x 64 times 64 x 192: 250 ms, and 0.4 ms with scales by row).
    if inverse_a.numel() != inverse_b.numel() or a.values.device.type == "cpu":
        inverse_a = inverse_a.expand(a.values.shape[0], 1).contiguous()
        inverse_b = inverse_b.expand(b.values.shape[0], 1).contiguous()
    return torch._scaled_mm(
        a.values.contiguous(),
        b.values.contiguous().t(),
        scale_a=inverse_a,
        scale_b=inverse_b.t(),
        out_dtype=dtype,
        use_fast_accum=fast,
    )


class _Linear(torch.autograd.Function):
    """Backward casts again what forward has cast: autograd keeps one copy of an input that several layers read."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_values: Tensor | None,
        x_scale: Tensor | None,
        x_inverse: Tensor | None,
        whole: Tensor,
        values: Tensor | None,
        scale: Tensor | None,
        inverse: Tensor | None,
        recipe: Recipe,
        emulate: bool,
    ) -> Tensor:
        kept_x, weight = (x if x_values is None else x_values), (whole if values is None else values)
        ctx.save_for_backward(kept_x, x_scale, x_inverse, weight, scale, inverse)
        ctx.recipe, ctx.emulate = recipe, emulate
        flat_x = kept_x.flatten(0, -2)
        a = _read(flat_x, x_scale, x_inverse) or scale_and_cast(flat_x, by_row=recipe.by_row)
        b = _read(weight, scale, inverse) or scale_and_cast(weight, by_row=recipe.by_row)
        return multiply(a, b, x.dtype, emulate=emulate, fast=True).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, x_inverse, weight, scale, inverse = ctx.saved_tensors
        flat_x, flat_grad = x.flatten(0, -2), grad.flatten(0, -2)
        ready_x, ready = _read(flat_x, x_scale, x_inverse), _read(weight, scale, inverse)
        grad_x = _input_gradient(flat_grad, weight, ready, ctx.recipe, emulate=ctx.emulate)
        grad_weight = _weight_gradient(flat_grad, flat_x, ready_x, ctx.recipe, emulate=ctx.emulate)
        return grad_x.unflatten(0, x.shape[:-1]), None, None, None, grad_weight, None, None, None, None, None


def _input_gradient(grad: Tensor, weight: Tensor, ready: Scaled | None, recipe: Recipe, *, emulate: bool) -> Tensor:
    """Return grad @ weight. `ready` is the weight in float8 with one scale, where there is one."""
    a = scale_and_cast(grad, recipe.gradient_dtype, by_row=recipe.by_row)
    if ready is not None:
        return multiply(a, transpose(ready), grad.dtype, emulate=emulate)
    # torchao has one scale for the whole weight here where the weight's own gradient is in high precision.
    b = scale_and_cast(weight.t(), by_row=recipe.is_weight_gradient_float8)
    return multiply(a, b, grad.dtype, emulate=emulate)


def _weight_gradient(grad: Tensor, x: Tensor, ready: Scaled | None, recipe: Recipe, *, emulate: bool) -> Tensor:
    """Return grad.T @ x, whose contracted dim is that of tokens. `ready` is x in float8, where its scale is known."""
    if not recipe.is_weight_gradient_float8:
        return grad.t() @ x
    if recipe.by_row:
        a = scale_and_cast(grad.t(), recipe.gradient_dtype, by_row=True)
        b = scale_and_cast(x.t(), by_row=True)
    else:
        a, b = transpose(scale_and_cast(grad, recipe.gradient_dtype)), transpose(ready or scale_and_cast(x))
    return multiply(a, b, grad.dtype, emulate=emulate)


def transpose(x: Scaled) -> Scaled:
    """Return the transposed of a matrix with one scale."""
    return Scaled(x.values.t(), x.inverse)


def _read(matrix: Tensor, scale: Tensor | None, inverse: Tensor | None) -> Scaled | None:
    """Return a matrix whose scale is known in float8, cast unless it is already; None where the scale isn't known."""
    if scale is None or inverse is None:
        return None
    values = matrix if matrix.dtype.itemsize == 1 else cast(matrix, Scale(scale, inverse))
    return Scaled(values, inverse)


# Dynamo would trace the function above step by step, forward and backward, for every layer: half of all compile time.
# It leaves a call of this one in the graph instead, which AOTAutograd traces like anything else.
@torch._dynamo.allow_in_graph
def float8_linear(
    x: Tensor,
    x_values: Tensor | None,
    x_scale: Tensor | None,
    x_inverse: Tensor | None,
    whole: Tensor,
    values: Tensor | None,
    scale: Tensor | None,
    inverse: Tensor | None,
    recipe_name: str,
    emulate: bool,
) -> Tensor:
    """Be the call that stands in captured graphs. Use `linear`."""
    of_x, of_weight = (x, x_values, x_scale, x_inverse), (whole, values, scale, inverse)
    return _Linear.apply(*of_x, *of_weight, RECIPES[recipe_name], emulate)


def linear(x: Tensor | Operand, weight: Tensor | Operand, recipe: Recipe, *, emulate: bool) -> Tensor:
    """Return x @ weight.T in the dtype of `x`, its matmuls and those of backward in float8 as `recipe` says."""
    return float8_linear(*_spread(x), *_spread(weight), recipe.name, emulate)


def _spread(operand: Tensor | Operand) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    if isinstance(operand, Operand):
        return operand.whole, operand.values, *operand.scale
    return operand, None, None, None
