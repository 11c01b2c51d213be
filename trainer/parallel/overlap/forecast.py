"""What a whole training step would take: both directions under one plan, the update, and what is always in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer.parallel.overlap.auto import Candidate, World, judge, plan_automatically
from trainer.parallel.overlap.find import is_parameter
from trainer.parallel.overlap.floor import exposed_floor
from trainer.parallel.overlap.plan import plan_by_block
from trainer.parallel.overlap.storage import bytes_of, tensors_of
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
class LossOutside:
    """A loss that is no part of the model's graphs, each of its operations a kernel."""

    forward: Candidate
    backward: Candidate
    logits_bytes: int
    keeps_logits: bool

    @property
    def seconds(self) -> float:
        return self.forward.simulation.seconds + self.backward.simulation.seconds

    def peak_bytes(self, kept: int) -> int:
        """Return the most that is live in the loss, where the model's forward has left `kept` bytes with the logits."""
        before = kept if self.keeps_logits else kept - self.logits_bytes
        return max(kept + self.forward.simulation.peak_bytes, before + self.backward.simulation.peak_bytes)


@dataclass(frozen=True)
class Forecast:
    """One plan's step."""

    plan: str
    step: Step
    forward: Candidate
    backward: Candidate
    update_seconds: float
    loss: LossOutside | None = None

    @property
    def state_bytes(self) -> int:
        """Parameters and moments, always there; and gradients, where microbatches add up."""
        copies = 1 + self.step.moments + (self.step.microbatches > 1)
        return self.step.parameter_bytes * copies

    @property
    def seconds(self) -> float:
        both = self.forward.simulation.seconds + self.backward.simulation.seconds
        loss = self.loss.seconds if self.loss else 0.0
        return (both + loss) * self.step.microbatches + self.update_seconds

    @property
    def peak_bytes(self) -> int:
        forward, backward = self.forward.simulation, self.backward.simulation
        loss = self.loss.peak_bytes(forward.left_bytes) if self.loss else 0
        return self.state_bytes + max(forward.peak_bytes, loss, backward.peak_bytes)

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
    loss = judge_loss(traced, world)
    return [Forecast(plan, step, forward, backward, update, loss) for plan, (forward, backward) in candidates.items()]


def judge_loss(traced: Traced, world: World) -> LossOutside | None:
    """Simulate a loss that has graphs of its own; None where it is in the model's."""
    if traced.loss is None:
        return None
    forward, backward = (judge(gm, replace(world, fuse=False), "none", []) for gm in traced.loss)
    (logits,) = tensors_of(next(iter(traced.loss[0].graph.nodes)))
    kept = [node for node in traced.loss[1].graph.find_nodes(op="placeholder") if is_parameter(node)]
    return LossOutside(forward, backward, bytes_of(logits), keeps_logits=bool(kept))


def floors(traced: Traced, world: World) -> dict[str, float]:
    """Return, by direction, the least seconds of data axes' communication that any plan leaves exposed."""
    graphs = {"forward": traced.forward, "backward": traced.backward}
    return {name: exposed_floor(world.price(gm), world.rings, world.hardware) for name, gm in graphs.items()}
