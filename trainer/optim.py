"""Optimizers over local shards, and which parameters are decayed.

The update is elementwise, so a rank updates the plain tensors inside its DTensors with PyTorch's fused kernels: no
DTensor dispatch for each parameter, and the state has the sharding of the parameter. `state_tensors` hands the state
out as DTensors again, so that a checkpoint can reshard it.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing its memory, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_parameter(value: Tensor, parameter: Tensor) -> Tensor:
    """Dress a local shard as the DTensor that `parameter` is, without communication."""
    if not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def split_by_decay(names: list[str], no_decay: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Split parameter names into (decayed, not decayed); that each pattern matches one is checked with the config."""
    kept = [name for name in names if any(fnmatchcase(name, pattern) for pattern in no_decay)]
    return [name for name in names if name not in set(kept)], kept


class Optimizer:
    """AdamW, Adam or SGD over the local shards of named parameters.

    `step` takes a float32 scalar `found_inf`: where it is 1 the kernels leave parameters and state untouched, without
    the host knowing. It raises RuntimeError that names parameters without gradient. State exists from the start, so
    that saving and loading need no first step.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        name: str,
        weight_decay: float,
        no_decay: tuple[str, ...],
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.0,
    ) -> None:
        self.parameters = {key: p for key, p in parameters.items() if p.requires_grad}
        self.decayed, self.not_decayed = split_by_decay(list(self.parameters), no_decay)
        self._locals = {key: local(p.detach()) for key, p in self.parameters.items()}
        groups: list[dict[str, Any]] = [
            {"params": [self._locals[key] for key in self.decayed], "weight_decay": weight_decay},
            {"params": [self._locals[key] for key in self.not_decayed], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._optimizer: torch.optim.Optimizer
        if name == "SGD":
            self._optimizer = torch.optim.SGD(groups, lr=0.0, momentum=momentum, fused=True)
            self._state_names = ["momentum_buffer"] if momentum else []
        else:
            kind = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[name]
            self._optimizer = kind(groups, lr=0.0, betas=betas, eps=eps, fused=True)
            self._state_names = ["exp_avg", "exp_avg_sq", "step"]
        for value in self._locals.values():
            state = self._optimizer.state[value]
            for part in self._state_names:
                state[part] = torch.zeros((), device=value.device) if part == "step" else torch.zeros_like(value)

    @torch.no_grad()  # else to_local makes a node of the autograd graph for every gradient
    def step(self, lr: float, found_inf: Tensor) -> None:
        """Update every parameter once with learning rate `lr`, and drop the gradients."""
        gradients = {key: p.grad for key, p in self.parameters.items() if p.grad is not None}
        missing = sorted(self.parameters.keys() - gradients.keys())
        if missing:
            raise RuntimeError(f"No gradient reached {missing}: the loss doesn't depend on them. Freeze or remove them")
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        # The fused kernels read this attribute; it is how torch.amp.GradScaler hands them its own flag.
        self._optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        for key, gradient in gradients.items():
            self._locals[key].grad = local(gradient)
        self._optimizer.step()
        for key, p in self.parameters.items():
            self._locals[key].grad = p.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Map "<parameter name>.<state name>" to the state, sharded as the parameter is and sharing its memory."""
        tensors: dict[str, Tensor] = {}
        for key, p in self.parameters.items():
            state = self._optimizer.state[self._locals[key]]
            for part in self._state_names:
                tensors[f"{key}.{part}"] = state[part] if part == "step" else like_parameter(state[part], p)
        return tensors
