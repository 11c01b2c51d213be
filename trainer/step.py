"""One update of the parameters: the story of a batch, from rows to values on their way to the host.

Nothing here waits for the device. What happens between steps is `loop.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.build import Run
from trainer.data.batches import Microbatch
from trainer.distributed import HostCopy, to_device
from trainer.loss import count_labels
from trainer.parallel.gradients import clip_gradients
from trainer.parallel.mesh import DATA_AXES


@dataclass
class StepValues:
    """What one step computed, on its way to the host."""

    step: int
    lr: float
    values: HostCopy


def train_step(run: Run) -> StepValues:
    """Collective over all ranks. Do one update of the parameters."""
    run.metrics.start_step()
    with run.metrics.reading_data():
        rows = run.data.microbatches(run.state.step)
    microbatches = [_to_device(few, run.place.device) for few in rows]
    rank_tokens = torch.stack([count_labels(few.labels_BT) for few in microbatches]).sum()
    num_tokens = run.mesh.sum(rank_tokens, over=DATA_AXES)
    rank_share = run.accumulate(microbatches, num_tokens)
    loss = run.mesh.sum(rank_share, over=DATA_AXES)
    grad_norm = clip_gradients(run.model.parameters(), run.config.training.max_norm, run.mesh)
    run.state.mask_if_not_finite(loss, grad_norm)
    lr = run.schedule(run.state.step)
    run.saver.hold_updates()
    run.optimizer.step(lr, found_inf=run.state.non_finite)
    run.state.advance(num_tokens)
    rank_loss = rank_share * num_tokens / rank_tokens.clamp(min=1)
    values = StepValues(run.state.step, lr, measure(run, loss, grad_norm, rank_loss))
    run.metrics.end_step(run.state.step, run.tokens_per_step)
    return values


def _to_device(rows: Microbatch, device: torch.device) -> Microbatch:
    return Microbatch(to_device(rows.tokens_BT, device), to_device(rows.labels_BT, device))


def measure(run: Run, loss: Tensor, grad_norm: Tensor, rank_loss: Tensor) -> HostCopy:
    """Collective over the data axes. Send what a step's line tells to the host, without waiting for it."""
    max_loss = run.mesh.max(rank_loss, over=DATA_AXES)
    values = (loss, max_loss, grad_norm, run.state.tokens_seen, run.state.non_finite, rank_loss)
    return HostCopy(torch.stack([value.double() for value in values]))
