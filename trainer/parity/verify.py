"""The law as a measurement: whatever the mesh, an experiment gives the numbers of one process.

`verify` trains case after case and compares losses, gradient norms and weights with those of one process, and bits
where bits must agree. The bounds are here, and their reasons in docs/parity.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from trainer.config.schema import Config
from trainer.distributed import Place, gather_objects, host_group
from trainer.parallel.mesh import Mesh
from trainer.parity.case import Case
from trainer.parity.train import Result, Trainee, build_mesh_of_first

WAIT_SECONDS = 3600  # ranks wait while the first one trains alone, or a compiler works


@dataclass(frozen=True)
class Distance:
    """How far two trainings are apart: loss and norm relative, at the worst step; weights absolute, after all."""

    loss: float
    norm: float
    weights: float


# Sums of float32 in another order: measured 2e-7 (loss, norm) and 1e-6 (weights) on four ranks.
FLOAT32_BOUND = Distance(1e-5, 1e-5, 1e-5)
# A mesh may cost as much as one more rounding to bfloat16, whose significand has 8 bits: measured a quarter of that.
BFLOAT16_ROUNDOFF = 2.0**-8
# Sums in another order move few values across a rounding boundary of float8, and those by 1/16: measured 3e-7.
FLOAT8_BOUND = 1e-4


def bound_of(config: Config) -> Distance:
    """Return how far a case may be from one process, in the precision of `config`."""
    is_float32 = config.training.mixed_precision_param == "float32"
    if is_float32 and not config.model.is_float8:
        # AdamW moves weights in proportion to lr alone, so a larger lr than the tiny model's 1e-3 enlarges differences.
        weights = 1e-2 * config.optimizer.lr if config.optimizer.name != "SGD" else 0.0
        return replace(FLOAT32_BOUND, weights=max(FLOAT32_BOUND.weights, weights))
    # SGD moves a weight no farther than the clipped gradient, and in error by a roundoff of that. AdamW moves it by lr
    # even where the gradient is smaller than its rounding error, so such a weight may be anywhere on its way.
    farthest = config.optimizer.lr * config.training.steps
    if config.optimizer.name == "SGD":
        farthest *= config.training.max_norm * BFLOAT16_ROUNDOFF
    numbers = FLOAT8_BOUND if is_float32 else BFLOAT16_ROUNDOFF
    return Distance(numbers, numbers, farthest)


@dataclass(frozen=True)
class Row:
    """A line of the table. `failures` says what is wrong, and is empty where nothing is."""

    case: Case
    distance: Distance
    failures: tuple[str, ...]
    seconds: float


def died(case: Case) -> Row:
    """Return the row of a case that the ranks didn't survive."""
    return Row(case, Distance(math.inf, math.inf, math.inf), ("a rank died",), 0.0)


class Verification:
    """What is kept from case to case: meshes, trainings of one process, the bits seen, and the newest model."""

    def __init__(self, base: Config, place: Place) -> None:
        self._base, self._place = base, place
        self._host = host_group(WAIT_SECONDS)
        self._meshes: dict[tuple[int, int, int], Mesh | None] = {}
        self._references: dict[Case, Result] = {}
        self._bits: dict[Case, tuple[object, ...]] = {}
        self._repeatable = place.device.type == "cpu" or base.debug.deterministic
        self._newest: tuple[Case, Trainee] | None = None

    def check(self, case: Case) -> Row:
        """Train a case and compare it. Collective over all ranks, of which it takes the first. All get the row."""
        start = time.perf_counter()
        reference = self._train_reference(case.reference())
        result = self._train(case)
        seen = gather_objects((result.bits, tuple(result.labels)) if result else None, self._host)[: case.ranks]
        row = None
        if result is not None and reference is not None:
            distance = measure_distance(result, reference)
            failures = [
                *find_excess(distance, bound_of(case.configure(self._base))),
                *self._find_other_bits(case, [bits for bits, _ in seen]),
            ]
            if case.data_ranks > 1 and len({labels for _, labels in seen}) == 1:
                failures.append("all ranks counted the same labels, which proves nothing")
            row = Row(case, distance, tuple(failures), time.perf_counter() - start)
        return gather_objects(row, self._host)[0]

    def _train_reference(self, case: Case) -> Result | None:
        """Train on rank 0 alone, once; None elsewhere."""
        mesh = self._mesh_of(case)
        if mesh is not None and case not in self._references:
            self._references[case] = self._build(case, mesh).train(case.configure(self._base))
        return self._references.get(case)

    def _train(self, case: Case) -> Result | None:
        """Train on the first ranks; None elsewhere. Cases that differ in the optimizer share one compiled model."""
        mesh, graph = self._mesh_of(case), replace(case, optimizer="")
        if mesh is None:
            return None
        if self._newest is None or self._newest[0] != graph:
            self._newest = None  # its memory is needed
            self._newest = (graph, self._build(case, mesh))
        return self._newest[1].train(case.configure(self._base))

    def _build(self, case: Case, mesh: Mesh) -> Trainee:
        torch._dynamo.reset()  # it refuses to compile the same function for many models
        return Trainee(case, self._base, mesh, self._place)

    def _mesh_of(self, case: Case) -> Mesh | None:
        degrees = (case.replicate, case.shard, case.tp)
        if degrees not in self._meshes:
            self._meshes[degrees] = build_mesh_of_first(case, self._place)
        return self._meshes[degrees]

    def _find_other_bits(self, case: Case, seen: list[tuple[object, ...]]) -> Iterator[str]:
        if any(bits != seen[0] for bits in seen):
            yield "ranks end with different bits"
        if self._repeatable and self._bits.setdefault(case.twin(), seen[0]) != seen[0]:
            yield "not the bits of the same case before" if case.twin() == case else f"not the bits of {case.twin()}"


def verify(cases: Sequence[Case], base: Config, place: Place) -> Iterator[Row]:
    """Check the cases one after the other. Collective over all ranks; every rank gets every row."""
    verification = Verification(base, place)
    for case in cases:
        yield verification.check(case)


def measure_distance(result: Result, reference: Result) -> Distance:
    """Return how far a training is from its reference; infinite where a value is not finite."""
    assert result.weights.keys() == reference.weights.keys()
    weights = [
        float((weight - reference.weights[name]).abs().max()) if weight.numel() else 0.0
        for name, weight in result.weights.items()
    ]
    return Distance(
        loss=_largest([abs(a - b) / abs(b) for a, b in zip(result.losses, reference.losses, strict=True)]),
        norm=_largest([abs(a - b) / abs(b) for a, b in zip(result.norms, reference.norms, strict=True)]),
        weights=_largest(weights),
    )


def _largest(values: list[float]) -> float:
    return max(values) if all(math.isfinite(value) for value in values) else math.inf


def find_excess(distance: Distance, bound: Distance) -> Iterator[str]:
    """Yield what is beyond its bound."""
    for name in ("loss", "norm", "weights"):
        value, limit = getattr(distance, name), getattr(bound, name)
        if value > limit:
            yield f"{name} {value:.1e} > {limit:.1e}"
