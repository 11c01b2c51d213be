"""Replacing the parameters of a model without undoing which modules share them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def replace_parameters(model: nn.Module, replacement: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Put `replacement(name, parameter)` in the place of every parameter. Changes `model`.

    A parameter shared by several modules is replaced once, under its first name, and stays shared.
    """
    new = {old: replacement(name, old) for name, old in model.named_parameters()}
    for module in model.modules():
        module._parameters.update({key: new[p] for key, p in module._parameters.items() if p is not None})
