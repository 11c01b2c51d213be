"""SimpleFSDP (arXiv 2411.00284): a sharded parameter is an ordinary parameter whose *use* gathers it.

Every parameter becomes a DTensor over the data axes, and reading it from its module gathers it. Both are DTensor
operations, so the compiler sees computation and communication in one graph, forward and backward; backward is derived:
the gradient of a gather is a reduce-scatter, over the replicate axis an all-reduce. Owns no hook, stream or buffer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.parallel.parameters import replace_parameters

PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0))  # over (dp_replicate, dp_shard)


@dataclass(frozen=True)
class Precision:
    """`param_dtype` of a gathered parameter and `reduce_dtype` in which its gradient is summed over data ranks."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype


def gather(parameter: DTensor, precision: Precision) -> Tensor:
    """Return the whole parameter as a plain tensor in `param_dtype`. Collective over the data axes.

    The shard is cast before it travels. In backward each rank's gradient is one addend of a sum over data ranks, taken
    in `reduce_dtype`; the result has the parameter's placement and dtype.
    """
    axes = parameter.device_mesh.ndim
    whole = parameter.redistribute(
        placements=[Replicate()] * axes,
        forward_dtype=precision.param_dtype,
        backward_dtype=precision.reduce_dtype,
    )
    return whole.to_local(grad_placements=[Partial("sum")] * axes)


@functools.cache
def _gathering_class(cls: type[nn.Module], names: tuple[str, ...], precision: Precision) -> type[nn.Module]:
    """Return the subclass of `cls` whose attributes `names` gather when read.

    One class for each set of arguments, so that equal layers have the same type and the compiler may treat them alike.
    """

    def gathering(name: str) -> property:
        return property(lambda self: gather(self._parameters[name], precision))

    body: dict[str, Any] = {name: gathering(name) for name in names}
    return type(f"Gathering{cls.__name__}", (cls,), body)


def shard_on_meta(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return a meta parameter as a meta DTensor with this rank's share of rows, which may be none."""
    shape, _ = compute_local_shape_and_global_offset(parameter.shape, mesh, PLACEMENTS)
    shard = torch.empty(shape, dtype=parameter.dtype, device="meta")
    whole = DTensor.from_local(
        shard, mesh, PLACEMENTS, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def apply_simple_fsdp(model: nn.Module, mesh: DeviceMesh, precision: Precision) -> None:
    """Shard every parameter of `model`, on the meta device, and let its modules gather on use. Changes `model`.

    `mesh` has the axes (dp_replicate, dp_shard): rows are divided over dp_shard and repeated over dp_replicate, so one
    of the two being 1 gives replicated (DDP) or fully sharded data parallelism. A shared parameter stays shared.
    """
    replace_parameters(model, lambda _, parameter: shard_on_meta(parameter, mesh))
    for module in model.modules():
        names = tuple(name for name, p in module._parameters.items() if p is not None)
        if names:
            module.__class__ = _gathering_class(type(module), names, precision)  # type: ignore[arg-type]
