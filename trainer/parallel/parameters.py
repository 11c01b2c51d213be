"""Replacing the parameters of a model without undoing which modules share them, and looking through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def replace_parameters(model: nn.Module, replacement: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Put `replacement(name, parameter)` in the place of every parameter. Changes `model`.

    A parameter shared by several modules is replaced once, under its first name, and stays shared.
    """
    new = {old: replacement(name, old) for name, old in model.named_parameters()}
    for module in model.modules():
        module._parameters.update({key: new[p] for key, p in module._parameters.items() if p is not None})


def find_not_finite(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of parameters whose part on this rank has values that aren't finite. Waits for the device."""
    parts = {name: (p.to_local() if isinstance(p, DTensor) else p).detach() for name, p in parameters.items()}
    return [name for name, part in parts.items() if not bool(torch.isfinite(part).all())]
