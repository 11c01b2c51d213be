"""Float8 against float64: scales, casts, and a linear layer's output and gradients, within bounds of the formats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trainer.parallel.float8 import device as float8_device
from trainer.parallel.float8.cast import E4M3, E5M2, Scaled, amax_of, cast, restore, scale_and_cast, scale_of
from trainer.parallel.float8.device import find_missing_float8
from trainer.parallel.float8.gather import agree_on_scale
from trainer.parallel.float8.matmul import RECIPES, Operand, linear

LARGEST = {E4M3: 448.0, E5M2: 57344.0}
# Half the distance of neighbours: relative to a normal value, and absolute below 2**-6 and 2**-14.
ROUNDOFF = {E4M3: 2.0**-4, E5M2: 2.0**-3}
LEAST = {E4M3: 2.0**-10, E5M2: 2.0**-17}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wild(*shape: int, seed: int = 0) -> Tensor:
    """Values over many magnitudes, with zeros and outliers."""
    x = draw(*shape, seed=seed) * torch.exp2(draw(*shape, seed=seed + 100) * 4)
    x[:, 1] = 0
    x[0] = 0
    x[-1, -1] = 3e4
    return x


def error_bound(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """Return what a cast with `scale` may change of each element."""
    return x.abs().double() * ROUNDOFF[dtype] + LEAST[dtype] / scale.double()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_scale_is_the_largest_power_of_two_that_keeps_values_within_the_format(dtype: torch.dtype) -> None:
    edges = [1.75, 1.7500001, 448.0, 448.00003, 57344.0, 57345.0, 1.0, 2.0**-39, 3.4e38]
    amax = torch.cat([torch.exp2(draw(10000) * 20).clamp(min=2.0**-39), torch.tensor(edges)])
    scale, inverse = scale_of(amax, dtype)
    power = torch.log2(scale.double())
    assert torch.equal(power, power.round())
    assert bool((amax.double() * scale.double() <= LARGEST[dtype]).all())
    assert bool((amax.double() * scale.double() * 2 > LARGEST[dtype]).all())
    assert torch.equal(scale.double() * inverse.double(), torch.ones_like(amax, dtype=torch.float64))


def test_zeros_have_a_scale_and_what_is_not_finite_has_none() -> None:
    x = scale_and_cast(torch.zeros(4, 4))
    assert torch.equal(restore(x, torch.float32), torch.zeros(4, 4))
    assert bool(torch.isfinite(x.inverse).all())
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.ones(4, 4)
        x[1, 2] = bad
        assert bool(restore(scale_and_cast(x), torch.float32).isnan().all())
        by_row = restore(scale_and_cast(x, by_row=True), torch.float32)
        assert by_row.isnan().all(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_cast_rounds_once_within_the_format(dtype: torch.dtype, by_row: bool) -> None:
    for x in (draw(48, 32), wild(48, 32), wild(48, 32).bfloat16()):
        scale = scale_of(amax_of(x, by_row=by_row), dtype)
        back = restore(Scaled(cast(x, scale, dtype), scale.inverse), torch.float32)
        assert bool(((back.double() - x.double()).abs() <= error_bound(x, dtype, scale.scale)).all())


def test_casting_twice_is_casting_once() -> None:
    for seed in range(20):
        once = restore(scale_and_cast(wild(16, 16, seed=seed)), torch.bfloat16)
        assert torch.equal(restore(scale_and_cast(once), torch.bfloat16), once)


def test_another_scale_changes_only_values_far_below_the_largest() -> None:
    """Why meshes, which see other largest values, agree: rounding is the same down to 2**-14 / 1.75 of the largest."""
    x = wild(64, 64)
    alone, beside = scale_of(amax_of(x), E4M3), scale_of(amax_of(x) * 8, E4M3)
    a, b = (cast(x, scale).float() * scale.inverse for scale in (alone, beside))
    is_normal = x.abs() * beside.scale >= 2.0**-6
    assert torch.equal(a[is_normal], b[is_normal])
    assert not torch.equal(a, b)
    assert float((a - b).abs().max() * beside.scale) <= 2 * LEAST[E4M3]


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("make", [draw, wild])
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_is_within_the_bound_of_its_formats_from_float64(name: str, make, emulate: bool) -> None:
    if not emulate and (missing := find_missing_float8(torch.device("cpu"), name, torch.float32)):
        pytest.skip(missing)
    recipe = RECIPES[name]
    x, w, grad = make(64, 48, seed=1), make(32, 48, seed=2), make(64, 32, seed=3)
    x.requires_grad_(), w.requires_grad_()
    weight = w if recipe.by_row else Operand(w, agree_on_scale(w.detach(), ()))
    y = linear(x.unsqueeze(0), weight, recipe, emulate=emulate)
    y.backward(grad.unsqueeze(0))
    x64, w64, grad64 = (t.detach().double() for t in (x, w, grad))

    def bound(a: Tensor, a_dtype: torch.dtype, b: Tensor, *, a_rows: bool, b_rows: bool) -> Tensor:
        """Bound |a'b'.T - ab.T| for casts a', b': |a'||b' - b| + |a' - a||b|, and float32 sums."""
        scales = [scale_of(amax_of(t.float(), by_row=rows), d).scale for t, rows, d in
                  ((a, a_rows, a_dtype), (b, b_rows, E4M3))]  # fmt: skip
        da, db = error_bound(a, a_dtype, scales[0]), error_bound(b, E4M3, scales[1])
        return (a.abs() + da) @ db.t() + da @ b.abs().t() + (a.abs() @ b.abs().t()) * 1e-5

    rows, g = recipe.by_row, recipe.gradient_dtype
    output, x_gradient, w_gradient = x64 @ w64.t(), grad64 @ w64, grad64.t() @ x64
    assert bool(((y[0].double() - output).abs() <= bound(x64, E4M3, w64, a_rows=rows, b_rows=rows)).all())
    limit = bound(grad64, g, w64.t(), a_rows=rows, b_rows=rows and recipe.is_weight_gradient_float8)
    assert bool(((x.grad.double() - x_gradient).abs() <= limit).all())
    if recipe.is_weight_gradient_float8:
        limit = bound(grad64.t(), g, x64.t(), a_rows=rows, b_rows=rows)
        assert bool(((w.grad.double() - w_gradient).abs() <= limit).all())
        assert not torch.allclose(w.grad.double(), w_gradient, rtol=1e-4), "nothing was cast"
    else:
        torch.testing.assert_close(w.grad.double(), w_gradient, rtol=1e-5, atol=1e-2)
    assert not torch.allclose(y[0].double(), output, rtol=1e-4), "nothing was cast"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_emulation_multiplies_the_same_values(name: str, dtype: torch.dtype) -> None:
    if missing := find_missing_float8(torch.device("cpu"), name, dtype):
        pytest.skip(missing)
    recipe, results = RECIPES[name], []
    for emulate in (False, True):
        x, w = draw(64, 48).to(dtype).requires_grad_(), draw(32, 48, seed=1).to(dtype).requires_grad_()
        y = linear(x, w if recipe.by_row else Operand(w, agree_on_scale(w.detach(), ())), recipe, emulate=emulate)
        y.backward(draw(64, 32, seed=2).to(dtype))
        results.append([y, x.grad, w.grad])
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-7
    for real, emulated in zip(*results, strict=True):
        torch.testing.assert_close(real, emulated, rtol=tolerance, atol=tolerance * float(real.detach().abs().max()))


def test_a_device_without_float8_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("torch._scaled_mm is only supported on newer devices\nand more")

    monkeypatch.setattr(float8_device, "multiply", refuse)
    find_missing_float8.cache_clear()
    missing = find_missing_float8(torch.device("cpu"), "tensorwise", torch.bfloat16)
    find_missing_float8.cache_clear()
    assert missing == "cpu: torch._scaled_mm is only supported on newer devices"
