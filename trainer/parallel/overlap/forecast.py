"""What a whole training step would take: both directions under one plan, the update, and what is always in memory."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.parallel.overlap.auto import Candidate, World, judge, plan_automatically
from trainer.parallel.overlap.floor import exposed_floor
from trainer.parallel.overlap.plan import plan_by_block
from trainer.parallel.overlap.trace import Traced

PLANS = ("none", "block", "auto")
DIRECTIONS = ("forward", "backward")

# AdamW reads parameter, gradient and two moments and writes all but the gradient; clipping reads the gradient once.
PASSES_OF_UPDATE = 8


@dataclass(frozen=True)
class Step:
    """One rank's step: rows of one microbatch, how many, and the copies of its parameters that the optimizer keeps."""

    tokens: int
    microbatches: int
    tp_ranks: int
    parameter_bytes: int
    moments: int


@dataclass(frozen=True)
class Forecast:
    """One plan's step."""

    plan: str
    step: Step
    forward: Candidate
    backward: Candidate
    update_seconds: float

    @property
    def state_bytes(self) -> int:
        """Parameters and moments, always there; and gradients, where microbatches add up."""
        copies = 1 + self.step.moments + (self.step.microbatches > 1)
        return self.step.parameter_bytes * copies

    @property
    def seconds(self) -> float:
        both = self.forward.simulation.seconds + self.backward.simulation.seconds
        return both * self.step.microbatches + self.update_seconds

    @property
    def peak_bytes(self) -> int:
        return self.state_bytes + max(self.forward.simulation.peak_bytes, self.backward.simulation.peak_bytes)

    @property
    def tokens_per_second(self) -> float:
        """Per rank, as published runs count: those of tp work on the same tokens."""
        return self.step.tokens * self.step.microbatches / self.seconds / self.step.tp_ranks

    def direction(self, name: str) -> Candidate:
        return {"forward": self.forward, "backward": self.backward}[name]


def forecast(traced: Traced, world: World, step: Step, *, blocks: str, limit_bytes: float) -> list[Forecast]:
    """Forecast the step under every plan. `limit_bytes` is the device memory that `auto` may use."""
    candidates: dict[str, list[Candidate]] = {plan: [] for plan in PLANS}
    left = limit_bytes - step.parameter_bytes * (1 + step.moments)
    for gm in (traced.forward, traced.backward):
        collectives = list(world.price(gm).collectives.values())
        candidates["none"].append(judge(gm, world, "none", []))
        candidates["block"].append(judge(gm, world, "block", plan_by_block(collectives, blocks)))
        candidates["auto"].append(plan_automatically(gm, world, blocks=blocks, limit_bytes=left)[0])
    update = PASSES_OF_UPDATE * step.parameter_bytes / world.hardware.bytes_per_second()
    return [Forecast(plan, step, forward, backward, update) for plan, (forward, backward) in candidates.items()]


def floors(traced: Traced, world: World) -> dict[str, float]:
    """Return, by direction, the least seconds of data axes' communication that any plan leaves exposed."""
    graphs = {"forward": traced.forward, "backward": traced.backward}
    return {name: exposed_floor(world.price(gm), world.rings, world.hardware) for name, gm in graphs.items()}
