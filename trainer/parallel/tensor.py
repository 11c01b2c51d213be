"""Tensor parallelism, applied from outside: parameters split by a table, and the collectives at modules' borders.

Between its borders a module runs the same lines on its part of heads or features. The residual stream is split along
the sequence. All collectives are functional, so they stand in the compiled graph like any operation. Roles of modules:

- `vocabulary`: an embedding whose rows are split; ids of other ranks give zeros, and the sum is split by sequence.
- `whole_sequence`: gathers its first argument along the sequence.
- `rows`: a linear layer whose output features are split; `columns`: one whose input features are, and whose output is
  summed and split by sequence; `head`: `whole_sequence` and `rows` at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.parallel.mesh import Mesh
from trainer.parallel.parameters import replace_parameters

COLLECTIVES = torch.ops._c10d_functional
SEQUENCE = 1  # the dim of tokens in every activation
SPLIT_DIM = {"vocabulary": 0, "rows": 0, "columns": 1, "head": 0}

# A module that gathers its first argument does it by what its attribute of this name is, called as `gather_sequence`.
GATHER_INPUT = "gather_input"


class Axis(NamedTuple):
    """The tensor-parallel axis as the graph sees it: constants."""

    size: int
    rank: int
    group: str


def axis_of(mesh: Mesh) -> Axis:
    """Return the mesh's tensor-parallel axis."""
    tp = mesh.axes["tp"]
    return Axis(tp.size(), tp.get_local_rank(), tp.get_group().group_name)


def all_gather(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Collective over `tp`. Return all ranks' parts, joined along `dim`; without gradient."""
    parts = COLLECTIVES.wait_tensor(COLLECTIVES.all_gather_into_tensor(x.contiguous(), axis.size, axis.group))
    return torch.cat(parts.chunk(axis.size), dim=dim) if dim else parts


def reduce_scatter(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Collective over `tp`. Return this rank's part along `dim` of the sum over ranks; without gradient."""
    parts = torch.cat(x.chunk(axis.size, dim=dim)) if dim else x
    return COLLECTIVES.wait_tensor(COLLECTIVES.reduce_scatter_tensor(parts.contiguous(), "sum", axis.size, axis.group))


def _all_reduce(x: Tensor, op: str, axis: Axis) -> Tensor:
    return COLLECTIVES.wait_tensor(COLLECTIVES.all_reduce(x.contiguous(), op, axis.group))


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, SEQUENCE, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, SEQUENCE, ctx.axis), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x, SEQUENCE, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, SEQUENCE, ctx.axis), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return _all_reduce(x, "sum", axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def gather_sequence(x_BTD: Tensor, axis: Axis) -> Tensor:
    """Collective over `tp`. Return the whole sequence of all ranks' parts; backward sums gradients and splits them."""
    return _GatherSequence.apply(x_BTD, axis)


def scatter_sum(x_BTD: Tensor, axis: Axis) -> Tensor:
    """Collective over `tp`, backward too. Return this rank's part of the sequence of the sum over ranks."""
    return _ScatterSum.apply(x_BTD, axis)


def sum_parts(x: Tensor, axis: Axis) -> Tensor:
    """Collective over `tp`. Return the sum over ranks, which all then use alike; backward passes gradients on."""
    return _Sum.apply(x, axis)


def gather_features(x: Tensor, size: int, axis: Axis) -> Tensor:
    """Collective over `tp`. Return all ranks' parts of the last dim, `size` in all; without gradient.

    Parts may be uneven: each travels padded to the largest.
    """
    part = -(-size // axis.size)
    padded = F.pad(x, (0, part - x.shape[-1])).movedim(-1, 0)
    return all_gather(padded, 0, axis)[:size].movedim(0, -1)


class VocabularyPart(nn.Embedding):
    """An embedding that has the rows from `first_id` on; ids of other ranks give zeros."""

    axis: Axis
    first_id: int

    def forward(self, ids_BT: Tensor) -> Tensor:
        weight = self.weight
        local = ids_BT - self.first_id
        mine = (local >= 0) & (local < weight.shape[0])
        rows_BTD = F.embedding(torch.where(mine, local, 0), weight)
        return scatter_sum(torch.where(mine.unsqueeze(-1), rows_BTD, 0), self.axis)


def _gather_first_argument(axis: Axis) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    return lambda module, inputs: (getattr(module, GATHER_INPUT, gather_sequence)(inputs[0], axis), *inputs[1:])


def _scatter_output(axis: Axis) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
    return lambda module, inputs, output: scatter_sum(output, axis)


def _give_role(module: nn.Module, role: str, axis: Axis) -> None:
    if role == "vocabulary":
        assert isinstance(module, nn.Embedding)
        first_id = axis.rank * -(-module.num_embeddings // axis.size)
        module.__class__ = VocabularyPart
        module.axis, module.first_id = axis, first_id  # type: ignore[assignment]
    if role in ("whole_sequence", "head"):
        module.register_forward_pre_hook(_gather_first_argument(axis))
    if role == "columns":
        module.register_forward_hook(_scatter_output(axis))


def _split(parameter: nn.Parameter, dim: int | None, tp: DeviceMesh) -> nn.Parameter:
    placement: Placement = Replicate() if dim is None else Shard(dim)
    shape, _ = compute_local_shape_and_global_offset(parameter.shape, tp, [placement])
    part = torch.empty(shape, dtype=parameter.dtype, device="meta")
    whole = DTensor.from_local(part, tp, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride())
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def find_roles(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Map names of modules to the roles that `plan` gives by pattern; ValueError for one that matches no module."""
    modules = [name for name, _ in model.named_modules()]
    roles: dict[str, str] = {}
    for pattern, role in plan.items():
        names = [name for name in modules if fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")]
        if not names:
            raise ValueError(f"The tensor-parallel plan names {pattern!r}, and the model has no such module")
        roles |= dict.fromkeys(names, role)
    return roles


def find_readers(model: nn.Module, plan: Mapping[str, str]) -> dict[str, list[str]]:
    """Map each module that gathers its input to the linear layers that multiply what it has gathered."""
    roles = find_roles(model, plan)
    readers = {name: [name] for name, role in roles.items() if role == "head"}
    for name, role in roles.items():
        if role == "whole_sequence":
            readers[name] = [other for other in roles if other.startswith(f"{name}.") and roles[other] == "rows"]
    return readers


def apply_tensor_parallel(model: nn.Module, mesh: Mesh, plan: Mapping[str, str]) -> None:
    """Split the parameters of `model`, on the meta device, over `tp` as `plan` says. Changes `model`.

    `plan` maps patterns of module names to roles; ValueError for one that matches no module.
    """
    if mesh.tp_ranks == 1:
        return
    axis, roles = axis_of(mesh), find_roles(model, plan)
    for name, role in roles.items():
        _give_role(model.get_submodule(name), role, axis)
    dims = {f"{name}.weight": SPLIT_DIM[role] for name, role in roles.items() if role in SPLIT_DIM}
    replace_parameters(model, lambda name, parameter: _split(parameter, dims.get(name), mesh.axes["tp"]))


def build_loss(
    sum_token_losses: Callable[[Tensor, Tensor], Tensor],
    mesh: Mesh,
    *,
    vocab_size: int,
    uncounted: int,
    loss_parallel: bool,
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss for logits as the head leaves them: whole, or this rank's part of the vocabulary.

    With `loss_parallel` the softmax is summed over ranks part by part, else the logits are gathered first.
    """
    if mesh.tp_ranks == 1:
        return sum_token_losses
    axis = axis_of(mesh)
    if loss_parallel:
        return lambda logits_BTV, labels_BT: sum_token_losses_in_parts(
            logits_BTV, labels_BT, axis, first_id=axis.rank * -(-vocab_size // axis.size), uncounted=uncounted
        )
    return lambda logits_BTV, labels_BT: sum_token_losses(
        _GatherVocabulary.apply(logits_BTV, vocab_size, axis), labels_BT
    )


class _GatherVocabulary(torch.autograd.Function):
    """All ranks compute the same loss of the gathered logits, so each keeps its own part of the gradient, unsummed."""

    @staticmethod
    def forward(ctx: Any, logits_BTV: Tensor, vocab_size: int, axis: Axis) -> Tensor:
        ctx.first, ctx.part = axis.rank * -(-vocab_size // axis.size), logits_BTV.shape[-1]
        return gather_features(logits_BTV, vocab_size, axis)

    @staticmethod
    def backward(ctx: Any, grad_BTV: Tensor) -> tuple[Tensor, None, None]:
        return grad_BTV.narrow(-1, ctx.first, ctx.part).contiguous(), None, None


def sum_token_losses_in_parts(
    logits_BTV: Tensor, labels_BT: Tensor, axis: Axis, *, first_id: int, uncounted: int
) -> Tensor:
    """Collective over `tp`. Return the sum of token losses from this rank's part of the vocabulary, float32.

    -log p(label) = log sum_v exp(z_v - m) - (z_label - m), each term a sum over ranks of local sums; m is the largest
    logit of the token over all ranks, which cancels out and so needs no gradient.
    """
    z_BTV = logits_BTV.float()
    largest_BT = z_BTV.detach().amax(-1) if z_BTV.shape[-1] else z_BTV.new_full(z_BTV.shape[:-1], -torch.inf)
    z_BTV = z_BTV - _all_reduce(largest_BT, "max", axis).unsqueeze(-1)
    denominator_BT = sum_parts(z_BTV.exp().sum(-1), axis)
    local_BT = labels_BT - first_id
    mine_BT = (local_BT >= 0) & (local_BT < z_BTV.shape[-1])
    picked_BT = z_BTV.gather(-1, torch.where(mine_BT, local_BT, 0).unsqueeze(-1)).squeeze(-1)
    label_BT = sum_parts(torch.where(mine_BT, picked_BT, 0.0), axis)
    return torch.where(labels_BT != uncounted, denominator_BT.log() - label_BT, 0.0).sum()
