"""SimpleFSDP (arXiv 2411.00284): a sharded parameter is an ordinary parameter whose *use* gathers it.

Every parameter becomes a DTensor over the data axes, and reading it from its module gathers it. Both are DTensor
operations, so the compiler sees computation and communication in one graph, forward and backward; backward is derived:
the gradient of a gather is a reduce-scatter, over the replicate axis an all-reduce. Owns no hook, stream or buffer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.parallel.mesh import Mesh
from trainer.parallel.parameters import replace_parameters


@dataclass(frozen=True)
class Precision:
    """`param_dtype` of a gathered parameter and `reduce_dtype` in which its gradient is summed over data ranks."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype


def gather(parameter: DTensor, precision: Precision) -> Tensor:
    """Return the parameter, whole but for its split over `tp`, as a plain tensor in `param_dtype`.

    Collective over the data axes. The shard is cast before it travels. In backward each rank's gradient is one addend
    of a sum over data ranks, taken in `reduce_dtype`; the result has the parameter's placement and dtype. Ranks of `tp`
    that hold the same parameter use it for different parts of the sequence, so their gradients are addends as well.
    """
    whole = parameter.redistribute(
        placements=[Replicate(), Replicate(), parameter.placements[-1]],
        forward_dtype=precision.param_dtype,
        backward_dtype=precision.reduce_dtype,
    )
    return whole.to_local(grad_placements=_addend_placements(parameter))


def as_addend(gradient: Tensor, parameter: Tensor) -> DTensor:
    """Return this rank's gradient of the gathered `parameter` as one addend of the sum over ranks; moves nothing."""
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        gradient,
        parameter.device_mesh,
        _addend_placements(parameter),
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _addend_placements(parameter: DTensor) -> list[Placement]:
    *_, tp = parameter.placements
    return [Partial(), Partial(), tp if tp.is_shard() else Partial()]


GatherWatcher = Callable[[Tensor, Callable[[], Tensor]], None]
_watcher: GatherWatcher | None = None


@contextlib.contextmanager
def watch_gathers(watcher: GatherWatcher) -> Iterator[None]:
    """Within, call `watcher` with each gathered tensor and what gathers it again. For eager execution."""
    global _watcher
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None


def report_gather(whole: Tensor, again: Callable[[], Tensor]) -> None:
    """Tell the watcher, if there is one, of a gathered tensor, and how to gather it again."""
    if _watcher is not None:
        _watcher(whole, again)


def read(parameter: Tensor, precision: Precision) -> Tensor:
    """Be what reading a parameter from its module means: `gather`, of which the watcher hears.

    A parameter that is held whole stands in its module as a plain tensor, and is read as it is.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    whole = gather(parameter, precision)
    report_gather(whole, lambda: gather(parameter, precision))
    return whole


# A module class with an attribute of this name reads its parameters by what that is, called as `read` is.
READ_PARAMETER = "read_parameter"


@functools.cache
def _gathering_class(cls: type[nn.Module], names: tuple[str, ...], precision: Precision) -> type[nn.Module]:
    """Return the subclass of `cls` whose attributes `names` gather when read.

    One class for each set of arguments, so that equal layers have the same type and the compiler may treat them alike.
    """
    read_parameter = getattr(cls, READ_PARAMETER, read)

    def gathering(name: str) -> property:
        return property(lambda self: read_parameter(self._parameters[name], precision))

    body: dict[str, Any] = {name: gathering(name) for name in names}
    return type(f"Gathering{cls.__name__}", (cls,), body)


def choose_placements(parameter: nn.Parameter) -> tuple[Placement, Placement, Placement]:
    """Return where a parameter is stored over (dp_replicate, dp_shard, tp).

    The data axis divides rows, or columns where `tp` divides rows already. Two axes never divide one dim, so plain
    `Shard` placements describe every layout and any checkpoint can be resharded.
    """
    tp = parameter.placements[0] if isinstance(parameter, DTensor) else Replicate()
    return Replicate(), Shard(1 if tp.is_shard(0) else 0), tp


def shard_on_meta(parameter: nn.Parameter, mesh: Mesh) -> nn.Parameter:
    """Return a meta parameter as a meta DTensor with this rank's share, which may be nothing."""
    placements = choose_placements(parameter)
    shape, _ = compute_local_shape_and_global_offset(parameter.shape, mesh.storage, placements)
    shard = torch.empty(shape, dtype=parameter.dtype, device="meta")
    whole = DTensor.from_local(
        shard, mesh.storage, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def apply_simple_fsdp(model: nn.Module, mesh: Mesh, precision: Precision) -> None:
    """Shard every parameter of `model`, on the meta device, and let its modules gather on use. Changes `model`.

    Parameters are divided over dp_shard and repeated over dp_replicate, so one of the two being 1 gives replicated
    (DDP) or fully sharded data parallelism; what `tp` has split stays split. A shared parameter stays shared.
    """
    replace_parameters(model, lambda _, parameter: shard_on_meta(parameter, mesh))
    for module in model.modules():
        names = tuple(name for name, p in module._parameters.items() if p is not None)
        if names:
            module.__class__ = _gathering_class(type(module), names, precision)  # type: ignore[arg-type]
