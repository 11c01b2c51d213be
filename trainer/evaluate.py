"""Loss on held-out rows: one sum of token losses over one number of tokens, whatever the ranks and microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.data.batches import Microbatch
from trainer.distributed import to_device
from trainer.loss import count_labels
from trainer.parallel.mesh import DATA_AXES, Mesh


@dataclass(frozen=True)
class Evaluation:
    loss: float
    tokens: int


def evaluate(
    sum_losses: Callable[[Tensor, Tensor], Tensor],
    held_out: Iterable[Microbatch],
    mesh: Mesh,
    device: torch.device,
    interrupted: Callable[[], bool],
) -> Evaluation | None:
    """Collective over all ranks. Return the mean loss of the held-out tokens, or None if interrupted.

    Every rank has the same number of microbatches, padded with uncounted labels. The training graph is used as it is,
    gradients recorded and dropped: a graph without them would be a second compilation, with other float bits.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    tokens = torch.zeros((), dtype=torch.int64, device=device)
    for rows in held_out:
        if interrupted():
            return None
        labels_BT = to_device(rows.labels_BT, device)
        total += sum_losses(to_device(rows.tokens_BT, device), labels_BT).detach()
        tokens += count_labels(labels_BT)
    counted = int(mesh.sum(tokens, over=DATA_AXES).item())
    return Evaluation(loss=mesh.sum(total, over=DATA_AXES).item() / counted, tokens=counted)
