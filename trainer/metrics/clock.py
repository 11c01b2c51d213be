"""Where a run's seconds go: training, reading data, and what is kept apart from training.

Throughput counts training and data reading only. The first step of a launch (tracing and compiling), validation and
checkpoints are kept apart. Takes time stamps and nothing else: no device, no files, no communication.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

Apart = Literal["validation", "checkpoint"]


class Totals(NamedTuple):
    """Sums over some steps. `timed_*` leave the first step of the launch out, and all time kept apart."""

    steps: int = 0
    timed_steps: int = 0
    timed_tokens: int = 0
    timed_seconds: float = 0.0
    data_seconds: float = 0.0
    validation_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    compile_seconds: float = 0.0

    def since(self, earlier: "Totals") -> "Totals":
        return Totals._make(now - then for now, then in zip(self, earlier, strict=True))


class StepClock:
    """Stamps the end of each step when it is issued, and gives the sums between two stamps later.

    The numbers of a step are read while the device is already busy with the next one; the time of reading
    therefore says nothing about the step.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._steps = 0
        self._timed_tokens = 0
        self._data_seconds = 0.0
        self._apart: dict[str, float] = {"validation": 0.0, "checkpoint": 0.0, "compile": 0.0}
        self._open: tuple[Apart, float] | None = None  # what is being kept apart, and since when
        self._first_began = now()
        self._apart_before_first = 0.0
        self._timed_began = 0.0  # on the scale of `_training_seconds`
        self._stamps: dict[int, Totals] = {}
        self._last_lap = Totals()

    @property
    def first_step_is_done(self) -> bool:
        return self._steps > 0

    def apart_seconds(self, kind: Apart | Literal["compile"]) -> float:
        return self._apart[kind]

    def start_step(self) -> None:
        if not self.first_step_is_done:
            self._first_began = self._settle()
            self._apart_before_first = sum(self._apart.values())

    def end_step(self, step: int, tokens: int) -> None:
        now = self._settle()
        if self._steps == 0:
            apart_inside = sum(self._apart.values()) - self._apart_before_first
            self._apart["compile"] += now - self._first_began - apart_inside
            self._timed_began = self._training_seconds(now)
        else:
            self._timed_tokens += tokens
        self._steps += 1
        self._stamps[step] = Totals(
            self._steps,
            self._steps - 1,
            self._timed_tokens,
            self._training_seconds(now) - self._timed_began,
            self._data_seconds,
            self._apart["validation"],
            self._apart["checkpoint"],
            self._apart["compile"],
        )

    @contextmanager
    def reading_data(self) -> Iterator[None]:
        began = self._now()
        try:
            yield
        finally:
            self._data_seconds += self._now() - began

    @contextmanager
    def apart(self, kind: Apart) -> Iterator[None]:
        assert self._open is None, f"{kind} inside {self._open}: its seconds would count twice"
        self._open = (kind, self._now())
        try:
            yield
        finally:
            self._settle()
            self._open = None

    def lap(self, step: int) -> Totals:
        """Give the sums of the steps after the last lap, up to and including `step`; stamps before it are forgotten."""
        assert step in self._stamps, f"step {step} was not stamped with end_step, or was asked for already"
        reached = self._stamps[step]
        lap = reached.since(self._last_lap)
        self._last_lap = reached
        self._stamps = {later: totals for later, totals in self._stamps.items() if later > step}
        return lap

    def _training_seconds(self, now: float) -> float:
        return now - sum(self._apart.values())

    def _settle(self) -> float:
        """Book what is being kept apart up to now, so that a stamp taken inside is right."""
        now = self._now()
        if self._open is not None:
            kind, began = self._open
            self._apart[kind] += now - began
            self._open = (kind, now)
        return now
