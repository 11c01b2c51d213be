"""The learning rate of a step, as a pure function of the step. It has no state, so a resume can't get it wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config.schema import Config

SHAPES = {
    "linear": lambda progress: 1.0 - progress,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


@dataclass(frozen=True)
class Schedule:
    """Warm-up, plateau, decay. Calling it with a number of completed updates gives the learning rate of the next one.

    Update number n (from 1) has peak * n / warmup_steps during warm-up, so the first is peak / warmup_steps and number
    warmup_steps is the peak exactly. The last `decay_steps` updates fall from the peak to `min_lr_factor` * peak, which
    the last one, number total_steps, reaches exactly; without any the peak holds. Later updates have the last one's.
    """

    peak: float
    warmup_steps: int
    decay_steps: int
    total_steps: int
    decay_type: str
    min_lr_factor: float

    def __call__(self, step: int) -> float:
        number = step + 1
        if number <= self.warmup_steps:
            return self.peak * number / self.warmup_steps
        into_decay = number - (self.total_steps - self.decay_steps)
        if into_decay <= 0 or self.decay_steps == 0:
            return self.peak
        shape = SHAPES[self.decay_type](min(1.0, into_decay / self.decay_steps))
        return self.peak * (self.min_lr_factor + (1.0 - self.min_lr_factor) * shape)


def build_schedule(
    *,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    decay_ratio: float | None,
    decay_type: str,
    min_lr_factor: float,
) -> Schedule:
    """Build the schedule; `decay_ratio` is the part of `total_steps` that decays, None all of it after warm-up."""
    after_warmup = total_steps - warmup_steps
    decay_steps = after_warmup if decay_ratio is None else min(after_warmup, round(total_steps * decay_ratio))
    return Schedule(peak, warmup_steps, decay_steps, total_steps, decay_type, min_lr_factor)


def build_schedule_of(config: Config) -> Schedule:
    """Build the schedule of a config whose total_steps, if left open, is training.steps."""
    settings = config.lr_scheduler
    return build_schedule(
        peak=config.optimizer.lr,
        warmup_steps=settings.warmup_steps,
        total_steps=settings.total_steps or config.training.steps,
        decay_ratio=settings.decay_ratio,
        decay_type=settings.decay_type,
        min_lr_factor=settings.min_lr_factor,
    )
