"""Measuring how long training stalls for a checkpoint, saved in step with it and beside it.

A stall is what a step waits for: the call that saves, and later the one that seals. Steps that are slower while a
thread writes are counted apart. The state is that of SimpleFSDP without a compiler.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from trainer.benchmark.measure import draw_batch
from trainer.benchmark.result import describe_machine
from trainer.benchmark.variants import Setup, build_variant
from trainer.checkpoint.folder import remove_old
from trainer.checkpoint.saver import ASYNC, ASYNC_PINNED, IN_STEP, Progress, Saver
from trainer.interrupt import Interrupt
from trainer.optim import local
from trainer.state import checkpoint_tensors

STEPS_BEFORE = 5  # whose median is an undisturbed step


@dataclass
class Saved:
    """One save, in seconds of the slowest rank. `steps` are those begun and done while a thread wrote."""

    mode: str
    number: int
    stall_seconds: float
    slower_seconds: float
    steps: int
    until_sealed_seconds: float


@dataclass(frozen=True)
class SavingResult:
    """All saves of one benchmark, and what they were taken of."""

    saves: list[Saved]
    state_bytes: int
    step_seconds: float
    config: str
    ranks: int
    device: str

    def to_json(self) -> dict[str, Any]:
        """Return everything, as plain JSON values."""
        return asdict(self) | {"machine": describe_machine(self.device, self.ranks)}

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table."""
        yield f"{self.config}: {self.state_bytes / 1e9:.2f} GB of state, a step alone {self.step_seconds:.3f} s"
        yield ", ".join(f"{name} {value}" for name, value in describe_machine(self.device, self.ranks).items())
        yield ""
        yield f"{'async_mode':22} {'save':>4} {'s stalled':>10} {'s slower':>9} {'in steps':>8} {'s until sealed':>14}"
        for s in self.saves:
            yield (
                f"{s.mode:22} {s.number:4} {s.stall_seconds:10.3f} {s.slower_seconds:9.3f} {s.steps:8} "
                f"{s.until_sealed_seconds:14.3f}"
            )
        yield from self._summary()

    def _summary(self) -> Iterator[str]:
        stalls = {
            mode: [s.stall_seconds for s in self.saves if s.mode == mode and s.number > 1]
            for mode in dict.fromkeys(s.mode for s in self.saves)
        }
        in_step, *others = [(mode, median(values)) for mode, values in stalls.items() if values] or [("", 0.0)]
        for mode, stall in others:
            yield f"From the second save on, {mode} stalls {stall / in_step[1]:.1%} of {in_step[0]}"


def measure_saving(setup: Setup, *, saves: int, folder: Path, config: str) -> SavingResult:
    """Collective over all ranks. Save `saves` times in each mode, to a folder below `folder` that is then removed."""
    trainee = _Trainee(setup)
    trainee.step_seconds()  # warms up
    alone = median(trainee.step_seconds() for _ in range(STEPS_BEFORE))
    modes = [IN_STEP, ASYNC, *([ASYNC_PINNED] if setup.device.type == "cuda" else [])]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fullgraph-benchmark-", dir=folder) as own:
        (shared,) = _agree_on([own])
        results = [s for mode in modes for s in trainee.save_often(mode, saves, Path(shared, mode), alone)]
        dist.barrier()
    return SavingResult(results, trainee.state_bytes(), alone, config, dist.get_world_size(), setup.device.type)


class _Trainee:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._variant = build_variant("eager", setup)
        self._group = dist.new_group(backend="gloo")
        self._interrupt = Interrupt(self._group)
        self._step = 0
        self._tensors = checkpoint_tensors(self._variant.model, self._variant.optimizer)

    def state_bytes(self) -> int:
        own = sum(local(tensor).nbytes for tensor in self._tensors.values())
        total = torch.tensor(own, device=self._setup.device)
        dist.all_reduce(total)
        return int(total)

    def step_seconds(self, saver: Saver | None = None) -> float:
        """Collective over all ranks. Do one step, which asks how far a save is as the loop does."""
        start = time.perf_counter()
        self._interrupt.ask(saver.progress() if saver else Progress.IDLE)
        self._variant.step(*draw_batch(self._setup, self._step))
        if self._setup.device.type == "cuda":
            torch.cuda.synchronize()
        self._step += 1
        self._interrupt.agreed()
        return time.perf_counter() - start

    def save_often(self, mode: str, saves: int, folder: Path, alone: float) -> list[Saved]:
        saver = Saver(folder, mode=mode, retire=lambda _: remove_old(folder, 1), process_group=self._group)
        return [self._save(saver, mode, number, alone) for number in range(1, saves + 1)]

    def _save(self, saver: Saver, mode: str, number: int, alone: float) -> Saved:
        """Collective over all ranks. Save once, and take steps until it is sealed."""
        dist.barrier()
        start = time.perf_counter()
        saver.save(self._step, tensors=self._tensors, state={}, attach=None)
        stall, steps = time.perf_counter() - start, []
        saver.hold_updates()
        while mode != IN_STEP:
            steps.append(self.step_seconds(saver))
            (largest,) = self._interrupt.largest
            before = time.perf_counter()
            saver.hear(largest)
            stall += time.perf_counter() - before
            if largest == Progress.WRITTEN:
                break
        until_sealed = time.perf_counter() - start
        slowest = torch.tensor([stall, sum(steps) - alone * len(steps), until_sealed], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self._group)
        stall, slower, until_sealed = slowest.tolist()
        self.step_seconds()  # of another step than the next save
        saver.finish()  # what is still being removed belongs to this save
        return Saved(mode, number, stall, slower, len(steps), until_sealed)


def _agree_on(values: list[str]) -> list[str]:
    dist.broadcast_object_list(values)
    return values
