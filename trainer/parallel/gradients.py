"""The norm of all gradients, and clipping by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.parallel.mesh import Mesh


def _sharded_axes(gradient: DTensor) -> tuple[str, ...]:
    names = gradient.device_mesh.mesh_dim_names or ()
    return tuple(name for name, place in zip(names, gradient.placements, strict=True) if place.is_shard())


def _norms(gradients: list[Tensor]) -> Tensor:
    """Return norms of parts of all gradients, float32, which together have the same norm.

    On the CPU PyTorch adds the squares of a tensor one after the other, which in float32 is off by 2e-4 at 50 million
    elements; norms of rows, and the norm of those, are off by 4e-8. On GPUs one kernel sums all tensors as a tree.
    """
    if gradients[0].is_cuda:
        return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
    rows = [torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32) for gradient in gradients]
    return torch.cat([row.flatten() for row in rows])


def _as_stored(parameter: nn.Parameter) -> DTensor:
    """Return the gradient, placed as the parameter is.

    It is already, but in torch 2.11, which gives a dim that divides unevenly a wrong stride in backward and then copies
    the whole gradient to every rank of that axis. The check can go with the support of 2.11.
    """
    gradient = parameter.grad
    assert isinstance(parameter, DTensor)
    assert isinstance(gradient, DTensor)
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
        parameter.grad = gradient
    return gradient


@torch.no_grad()  # else to_local makes a node of the autograd graph for every gradient
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, mesh: Mesh) -> Tensor:
    """Scale all gradients in place so that their joint 2-norm is at most `max_norm`; return the norm before, float32.

    Collective over the axes that shard parameters. Squares are summed in float32 over local shards, then over the axes
    along which each parameter is divided; copies along other axes count once. A non-finite norm is returned as it is.
    """
    locals_by_axes: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = _as_stored(parameter)
            locals_by_axes[_sharded_axes(gradient)].append(gradient.to_local())
    squares = []
    for axes, gradients in locals_by_axes.items():
        squares.append(mesh.sum(_norms(gradients).square().sum(), over=axes))
    norm = torch.stack(squares).sum().sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradients in locals_by_axes.values():
        torch._foreach_mul_(gradients, scale)
    return norm
