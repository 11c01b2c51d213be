"""Parameters gathered once for all microbatches of a step, and their gradients summed once after the last.

While whole parameters are held they stand in the modules in the place of the sharded ones: plain leaves of autograd, on
which the gradients of all microbatches add up in `reduce_dtype`. It trades memory for communication: a rank holds all
that `tp` and the pipeline leave it, weights in `param_dtype` and gradients in `reduce_dtype`, instead of a block at a
time. Sequential and pipelined accumulation both use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainer.parallel.simple_fsdp import as_addend
from trainer.parallel.transfers import Transfers


class WholeParameters:
    """The parameters of a sharded model, which can be held whole for a while."""

    def __init__(self, model: nn.Module, reduce_dtype: torch.dtype, transfers: Transfers) -> None:
        self._reduce_dtype = reduce_dtype
        self._transfers = transfers
        # A tied parameter has several places, one leaf, and one gradient: the sum of all its uses.
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._places.setdefault(parameter, []).append((module, name))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Collective over the data axes, at both ends. Within, modules read whole parameters.

        At the end each parameter is given its gradient, the sum over data ranks, if there have been any.
        """
        sharded = list(self._places)
        leaves = [
            self._leaf(whole, parameter)
            for whole, parameter in zip(self._transfers.gather(sharded), sharded, strict=True)
        ]
        self._put(leaves)
        try:
            yield
        finally:
            self._put(sharded)
        with_gradient = [(p, leaf.grad) for p, leaf in zip(sharded, leaves, strict=True) if leaf.grad is not None]
        if with_gradient:
            self._sum(with_gradient)

    def _leaf(self, whole: Tensor, parameter: nn.Parameter) -> nn.Parameter:
        leaf = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        if parameter.requires_grad:
            leaf.grad_dtype = self._reduce_dtype
        return leaf

    def _put(self, parameters: list[nn.Parameter]) -> None:
        for places, parameter in zip(self._places.values(), parameters, strict=True):
            for module, name in places:
                module._parameters[name] = parameter

    def _sum(self, with_gradient: list[tuple[Any, Tensor]]) -> None:
        addends = [as_addend(gradient, parameter) for parameter, gradient in with_gradient]
        summed = self._transfers.sum(addends, [parameter.placements for parameter, _ in with_gradient])
        for (parameter, _), total in zip(with_gradient, summed, strict=True):
            gradient = total.to(parameter.dtype)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
