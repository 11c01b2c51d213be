"""Sampling from a parallelized model: the ids of a text in, the logits of the next token out, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trainer.parallel.mesh import Mesh
from trainer.parallel.tensor import axis_of, gather_features


def build_next_logits(
    model: nn.Module, mesh: Mesh, device: torch.device, *, vocab_size: int
) -> Callable[[Sequence[int]], Tensor]:
    """Return f(ids) -> logits_V, `vocab_size` of them. Calling it is collective over all axes that divide the model.

    Tensor parallelism splits the sequence, so it is padded to a multiple of `tp`; attention is causal, so what comes
    after the last id changes nothing before it. Each rank then has a part of the vocabulary.
    """

    def next_logits(ids: Sequence[int]) -> Tensor:
        padding = [0] * (-len(ids) % mesh.tp_ranks)
        logits_BTV = model(torch.tensor([[*ids, *padding]], device=device))
        logits_V = logits_BTV[0, len(ids) - 1]
        return logits_V if mesh.tp_ranks == 1 else gather_features(logits_V, vocab_size, axis_of(mesh))

    return next_logits
