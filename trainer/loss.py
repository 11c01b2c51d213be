"""The loss: a sum of token losses, never a mean. Whoever calls divides once, by the labels counted on all ranks.

Labels that are UNCOUNTED, the data's padding, take no part.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from trainer.labels import UNCOUNTED


def sum_token_losses(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Return the float32 sum of -log p(label) over the counted labels, the softmax taken in float32."""
    return F.cross_entropy(
        logits_BTV.float().flatten(0, 1), labels_BT.flatten(), ignore_index=UNCOUNTED, reduction="sum"
    )


def count_labels(labels_BT: Tensor) -> Tensor:
    """Return how many labels the loss counts, as an int64 scalar."""
    return (labels_BT != UNCOUNTED).sum()
