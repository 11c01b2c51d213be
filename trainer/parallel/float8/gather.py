"""What reading a weight means under tensorwise float8: a scale that all ranks agree on, and a gather of single bytes.

The scale is that of the whole weight: the largest magnitude over all ranks that hold a part. The shard is first cast to
`param_dtype`, as it is where bfloat16 travels, so both ways give the same float8 bits, on every mesh. The gather moves
uint8, as gloo knows no float8; a byte is a byte. The gradient takes the way it takes without float8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from trainer.parallel.float8.cast import E4M3, Scale, amax_of, cast, scale_of
from trainer.parallel.float8.matmul import Operand
from trainer.parallel.simple_fsdp import Precision, read, report_gather

COLLECTIVES = torch.ops._c10d_functional


@dataclass(frozen=True)
class ReadWeight:
    """Reads weights with one scale. `groups` are the names of the process groups that hold parts of the weight.

    With `in_float8` the shard is cast before it is gathered, else what is gathered is cast where it is used.
    """

    groups: tuple[str, ...]
    in_float8: bool

    def __call__(self, parameter: DTensor, precision: Precision) -> Operand:
        """Collective over the axes that divide the parameter."""
        scale = agree_on_scale(_shard_of(parameter, precision), self.groups)
        if not self.in_float8:
            return Operand(read(parameter, precision), scale)

        def gather_values() -> Tensor:
            return gather_bytes(parameter, precision, scale)

        values = gather_values()
        report_gather(values, gather_values)
        return Operand(_TakesGradient.apply(parameter, values.shape, precision), scale, values)


def _shard_of(parameter: DTensor, precision: Precision) -> Tensor:
    """Return this rank's part of a parameter as it would travel without float8."""
    local = parameter.detach()
    assert isinstance(local, DTensor)
    return local.to_local().to(precision.param_dtype)


def agree_on_scale(shard: Tensor, groups: tuple[str, ...]) -> Scale:
    """Collective over `groups`. Return the scale of the tensor of which each rank has a shard, maybe an empty one."""
    amax = amax_of(shard) if shard.numel() else shard.float().sum().reshape(1, 1)
    for group in groups:
        amax = COLLECTIVES.wait_tensor(COLLECTIVES.all_reduce(amax, "max", group))
    return scale_of(amax, E4M3)


def gather_bytes(parameter: DTensor, precision: Precision, scale: Scale) -> Tensor:
    """Collective over the data axes. Return the parameter in float8, whole but for its split over `tp`."""
    shard = _shard_of(parameter, precision)
    shards = DTensor.from_local(
        cast(shard, scale).view(torch.uint8),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    *_, tp = parameter.placements
    return shards.redistribute(placements=[Replicate(), Replicate(), tp]).to_local().view(E4M3)


class _TakesGradient(torch.autograd.Function):
    """A tensor of the gathered weight's shape, without memory of its own, whose gradient is the gathered weight's.

    Autograd has no gradients of float8 tensors, so this one stands beside them. Backward is `simple_fsdp.gather`'s.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, shape: torch.Size, precision: Precision) -> Tensor:
        ctx.mesh, ctx.placements, ctx.dtype = parameter.device_mesh, parameter.placements, parameter.dtype
        ctx.shape, ctx.stride, ctx.reduce_dtype = parameter.shape, parameter.stride(), precision.reduce_dtype
        return torch.zeros((), dtype=precision.param_dtype, device=parameter.device).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        *_, tp = ctx.placements
        addends = DTensor.from_local(
            grad.to(ctx.reduce_dtype),
            ctx.mesh,
            [Partial(), Partial(), tp if tp.is_shard() else Partial()],
            run_check=False,
            shape=ctx.shape,
            stride=ctx.stride,
        )
        return addends.redistribute(placements=ctx.placements).to(ctx.dtype), None, None
