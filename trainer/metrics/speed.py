"""Throughput and MFU: the formulas, and what their words mean. Pure arithmetic on numbers measured elsewhere.

Tokens are counted over all ranks. *Per device* divides by all ranks, also those that share a data rank (tensor and
pipeline parallel ranks), which is what v0.2 prints: the tokens of one data rank over its number of ranks.
"""

from typing import NamedTuple

from trainer.metrics.clock import Totals


class Peak(NamedTuple):
    """What one device could do at best, and how we know."""

    flops_per_second: float
    source: str


class Speed(NamedTuple):
    """Averages between two logged steps; None where nothing was timed, as at the first step of a launch."""

    step_seconds: float | None = None
    tps: float | None = None  # tokens per second and device
    tps_global: float | None = None
    tflops: float | None = None  # TFLOP/s of one device
    mfu_percent: float | None = None  # None as well without a peak
    mfu_float8_percent: float | None = None  # of the float8 peak, where layers are float8 and it is known


def compute_speed(
    lap: Totals, ranks: int, flops_per_token: float, peak: Peak | None, float8_peak: Peak | None = None
) -> Speed:
    """Compute the speed of the timed steps of `lap`.

    MFU, after PaLM (arXiv 2204.02311, appendix B), is the observed tokens per second over those of a system that
    runs at peak and does only the model's own work:

        mfu = tokens per second / (ranks * peak FLOP/s / FLOPs per token)

    `flops_per_token` is of the whole model, forward and backward; recomputed activations are not counted. `peak` is the
    compute dtype's also where layers multiply in float8; against `float8_peak` is another number of another name.
    """
    if lap.timed_tokens == 0 or lap.timed_seconds <= 0:
        return Speed()
    tps_global = lap.timed_tokens / lap.timed_seconds
    tps = tps_global / ranks
    flops_per_second = tps * flops_per_token
    return Speed(
        step_seconds=lap.timed_seconds / lap.timed_steps,
        tps=tps,
        tps_global=tps_global,
        tflops=flops_per_second / 1e12,
        mfu_percent=_percent_of(peak, flops_per_second),
        mfu_float8_percent=_percent_of(float8_peak, flops_per_second),
    )


def _percent_of(peak: Peak | None, flops_per_second: float) -> float | None:
    return None if peak is None else 100 * flops_per_second / peak.flops_per_second
