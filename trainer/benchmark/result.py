"""What a benchmark found: medians, spreads and ratios, whether all variants computed the same, table and JSON."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trainer.benchmark.measure import Measurement
from trainer.benchmark.variants import FSDP2_COMPILED, FSDP2_EAGER
from trainer.parity.verify import BFLOAT16_ROUNDOFF
from trainer.units import MIB

BASELINES = (FSDP2_EAGER, FSDP2_COMPILED)
# Losses of the same weights and tokens, relative, at the worst step. float32 sums in another order, step after step;
# in bfloat16 compiled kernels round where eager ones don't, and autocast (DDP) keeps more in float32.
LOSS_BOUNDS = {"float32": 1e-4, "bfloat16": BFLOAT16_ROUNDOFF}


@dataclass(frozen=True)
class Result:
    """All measurements of one benchmark, and what they were taken of."""

    measurements: Sequence[Measurement]
    config: str
    tokens_per_step: int
    precision: str
    ranks: int
    device: str

    def ratio(self, measurement: Measurement, baseline: str) -> float | None:
        """Return how many times faster than `baseline`: the median over rounds, each of which saw the same machine."""
        base = next((other for other in self.measurements if other.variant == baseline), None)
        if base is None:
            return None
        return median(b / own for b, own in zip(base.samples, measurement.samples, strict=True))

    def loss_difference(self, measurement: Measurement) -> float:
        """Return the largest relative difference to the first variant's losses, at the same steps; or infinity."""
        pairs = list(zip(measurement.losses, self.measurements[0].losses, strict=True))
        if not all(math.isfinite(own) and math.isfinite(other) for own, other in pairs):
            return math.inf
        return max(abs(own - other) / abs(other) for own, other in pairs)

    def find_wrong(self) -> list[str]:
        """Say which variants trained something else: their speed means nothing."""
        bound = LOSS_BOUNDS[self.precision]
        differences = {m.variant: self.loss_difference(m) for m in self.measurements}
        return [
            f"{variant}: its loss differs from {self.measurements[0].variant}'s by {difference:.1e}, and in "
            f"{self.precision} at most {bound:.1e} is right"
            for variant, difference in differences.items()
            if difference > bound
        ]

    def to_json(self) -> dict[str, Any]:
        """Return everything, as plain JSON values."""
        return {
            "config": self.config,
            "precision": self.precision,
            "tokens_per_step": self.tokens_per_step,
            "machine": describe_machine(self.device, self.ranks),
            "loss_bound": LOSS_BOUNDS[self.precision],
            "wrong": self.find_wrong(),
            "variants": [
                asdict(m)
                | {
                    "median_seconds": median(m.samples),
                    "loss_difference": self.loss_difference(m),
                    "ratios": {baseline: self.ratio(m, baseline) for baseline in BASELINES},
                }
                for m in self.measurements
            ],
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table."""
        machine = describe_machine(self.device, self.ranks)
        yield f"{self.config}: {self.tokens_per_step:,} tokens a step, {self.precision}"
        yield ", ".join(f"{name} {value}" for name, value in machine.items())
        yield ""
        yield (
            f"{'variant':14} {'ms a step':>10} {'(middle half)':>17} {'tokens/s':>10} {'x fsdp2':>8} "
            f"{'x fsdp2+compile':>15} {'peak MiB':>9} {'first s':>8} {'loss differs':>12}"
        )
        for m in self.measurements:
            low, high = middle_half(m.samples)
            ratios = [self.ratio(m, baseline) for baseline in BASELINES]
            eager, compiled = (f"{ratio:.2f}" if ratio else "-" for ratio in ratios)
            yield (
                f"{m.variant:14} {median(m.samples) * 1e3:10.2f} {f'{low * 1e3:.2f} to {high * 1e3:.2f}':>17} "
                f"{self.tokens_per_step / median(m.samples):10,.0f} {eager:>8} {compiled:>15} "
                f"{m.peak_bytes / MIB:9.1f} {m.first_step_seconds:8.1f} {self.loss_difference(m):12.1e}"
            )


def middle_half(samples: Sequence[float]) -> tuple[float, float]:
    """Return the first and third quartile."""
    ordered = sorted(samples)
    return ordered[(len(ordered) - 1) // 4], ordered[-1 - (len(ordered) - 1) // 4]


def describe_machine(device: str, ranks: int) -> dict[str, Any]:
    """Return what the numbers depend on besides the code."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "ranks": ranks,
        "cores": os.cpu_count(),
        "threads a rank": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    """Return the processor's name as Linux tells it, or its architecture."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
