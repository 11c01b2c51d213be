"""Turning chosen linear layers of a plain model into float8 ones. Which ones is not decided here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.parallel.float8.gather import ReadWeight
from trainer.parallel.float8.matmul import RECIPES, Operand, Recipe, linear
from trainer.parallel.float8.sequence import gather_in_float8
from trainer.parallel.mesh import Mesh
from trainer.parallel.simple_fsdp import READ_PARAMETER
from trainer.parallel.tensor import GATHER_INPUT, find_readers


@dataclass(frozen=True)
class Float8:
    """Which linear layers compute in float8, by which recipe of `RECIPES`.

    With `gather`, which needs one scale for a weight, weights are gathered in float8; with `emulate`, matmuls take the
    same values in the compute dtype.
    """

    layers: frozenset[str] = frozenset()
    recipe: str = "tensorwise"
    gather: bool = False
    emulate: bool = False


NOTHING_IN_FLOAT8 = Float8()


@functools.cache
def _float8_class(
    cls: type[nn.Module], recipe: Recipe, emulate: bool, read: Callable[..., Any] | None
) -> type[nn.Module]:
    def forward(self: nn.Module, x: Tensor | Operand) -> Tensor:
        return linear(x, self.weight, recipe, emulate=emulate)  # type: ignore[arg-type]

    body: dict[str, Any] = {"forward": forward}
    if read is not None:
        body[READ_PARAMETER] = staticmethod(read)
    return type(f"Float8{cls.__name__}", (cls,), body)


def apply_float8(model: nn.Module, mesh: Mesh, settings: Float8, plan: Mapping[str, str]) -> None:
    """Let the linear layers that `settings` name multiply in float8. Changes `model`.

    After tensor parallelism by `plan`, which decides what part of a weight a layer has; before the data axes, which
    must know how a float8 weight is read.
    """
    recipe = RECIPES[settings.recipe]
    if settings.gather and recipe.by_row:
        raise ValueError(f"A weight has one scale for its gather, and {recipe.name} scales its rows")
    for name in sorted(settings.layers):
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        assert layer.bias is None
        read = None if recipe.by_row else ReadWeight(_groups_of(layer, mesh), settings.gather)
        layer.__class__ = _float8_class(type(layer), recipe, settings.emulate, read)  # type: ignore[assignment]
    if mesh.tp_ranks > 1 and settings.layers and not recipe.by_row:
        _gather_sequences(model, settings.layers, plan)


def _gather_sequences(model: nn.Module, layers: frozenset[str], plan: Mapping[str, str]) -> None:
    """Let modules gather their input in float8 where all layers that multiply it are float8."""
    for name, readers in find_readers(model, plan).items():
        if layers.issuperset(readers):
            setattr(model.get_submodule(name), GATHER_INPUT, gather_in_float8)


def _groups_of(layer: nn.Linear, mesh: Mesh) -> tuple[str, ...]:
    """Return the process groups whose ranks hold different parts of the layer's weight once it is sharded."""
    is_split = isinstance(layer.weight, DTensor) and layer.weight.placements[0].is_shard()
    axes = ["dp_shard", *(["tp"] if is_split else [])]
    return tuple(mesh.axes.get_group(axis).group_name for axis in axes if mesh.size(axis) > 1)
