"""Whether a device multiplies float8 matrices, found by doing it."""

from __future__ import annotations

import functools

import torch

from trainer.parallel.float8.cast import scale_and_cast
from trainer.parallel.float8.matmul import RECIPES, Recipe, multiply

SIZE = 32  # of the matrices: the smallest that every kernel takes


@functools.cache
def find_missing_float8(device: torch.device, recipe_name: str, dtype: torch.dtype) -> str:
    """Return why `device` can't do the matmuls of a recipe with results in `dtype`; empty where it can."""
    recipe = RECIPES[recipe_name]
    try:
        _multiply_all(recipe, device, dtype)
    except (RuntimeError, NotImplementedError, ValueError) as error:  # what kernels raise differs
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
    else:
        return ""
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (SM{major}{minor}; float8 needs SM89 or newer): {reason}"
    return f"{device.type}: {reason}"


def _multiply_all(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> None:
    """Do what forward and backward do: both formats, and where a matmul mixes them, one scale beside many."""
    ones = torch.ones(SIZE, SIZE, dtype=dtype, device=device)
    values = scale_and_cast(ones, by_row=recipe.by_row)
    gradient = scale_and_cast(ones, recipe.gradient_dtype, by_row=recipe.by_row)
    whole = scale_and_cast(ones, by_row=recipe.by_row and recipe.is_weight_gradient_float8)
    multiply(values, values, dtype, emulate=False, fast=True)
    multiply(gradient, whole, dtype, emulate=False)
