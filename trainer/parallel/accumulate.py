"""Gradient accumulation: microbatches in, summed gradients and the loss out.

A pipeline has the same signature, so the loop doesn't know which of the two it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """Some rows of a step on this rank's device."""

    @property
    def tokens_BT(self) -> Tensor: ...
    @property
    def labels_BT(self) -> Tensor: ...


SumLosses = Callable[[Tensor, Tensor], Tensor]
Accumulate = Callable[[Sequence[Rows], Tensor], Tensor]
# Within what it returns, the functions that read the model's parameters may be called.
Reading = Callable[[], contextlib.AbstractContextManager[Any]]


def build_accumulate(sum_losses: SumLosses, reading: Reading = contextlib.nullcontext) -> Accumulate:
    """Return accumulate(microbatches, divisor), which runs them one after the other.

    `sum_losses(tokens_BT, labels_BT)` gives the sum of token losses. Gradients of (sum over microbatches) / divisor are
    added to the parameters, summed over data ranks; the return value is this rank's share of that loss, float32.
    All microbatches of a call are run within one `reading()`.
    """

    def accumulate(microbatches: Sequence[Rows], divisor: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=divisor.device)
        with reading():
            for rows in microbatches:
                loss = sum_losses(rows.tokens_BT, rows.labels_BT) / divisor
                loss.backward()
                total += loss.detach()
        return total

    return accumulate
