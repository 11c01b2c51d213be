"""Measuring variants side by side: in every round each takes a few steps, so that drift of the machine hits all.

Time is taken on real ranks. Memory on CPUs is taken apart, from the profiler's allocation events on a fake process
group: gloo frees buffers in threads of its own, whose events the profiler doesn't see.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from trainer.benchmark.variants import Variant, build_variant
from trainer.config.schema import Config
from trainer.data.batches import Microbatch
from trainer.distributed import Place, fake_process_group
from trainer.models.registry import build_shape
from trainer.parallel.mesh import Mesh
from trainer.parts import build_mesh_of

WARM_UP_STEPS = 3  # the first compiles; later ones fill caches and allocators


@dataclass
class Measurement:
    """What was measured of one variant. `samples` are seconds of one step, one sample a round."""

    variant: str
    first_step_seconds: float = 0.0
    samples: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def list_turns(variants: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """Yield the order of each round; the first variant moves on by one, so that none always follows the same other."""
    for number in range(rounds):
        first = number % len(variants)
        yield [*variants[first:], *variants[:first]]


def measure(config: Config, place: Place, variants: Sequence[str], *, steps: int, rounds: int) -> list[Measurement]:
    """Train every variant in turns and return its measurements. Collective over all ranks.

    Seconds are those of the slowest rank, and the losses the same on all.
    """
    mesh = build_mesh_of(config, place.device, place.world_size)
    trainees = {}
    for name in variants:
        before = torch.cuda.memory_allocated() if place.device.type == "cuda" else 0
        trainees[name] = Trainee(name, config, mesh, place.device)
        trainees[name].warm_up()
        if place.device.type == "cuda":
            trainees[name].measure_cuda_memory(before)
    for turn in list_turns(variants, rounds):
        for name in turn:
            trainees[name].take(steps)
    return [trainee.result for trainee in trainees.values()]


class Trainee:
    """A variant that takes steps, each on random tokens of its own: the same for all variants."""

    def __init__(self, name: str, config: Config, mesh: Mesh, device: torch.device) -> None:
        self.result = Measurement(name)
        self._config, self._mesh, self._device = config, mesh, device
        self._variant = build_variant(name, config, mesh, device)
        self._step = 0

    def warm_up(self) -> None:
        self.result.first_step_seconds = self._time(1)
        self._time(WARM_UP_STEPS - 1)

    def take(self, steps: int) -> None:
        self.result.samples.append(self._time(steps))

    def measure_cuda_memory(self, before: int) -> None:
        """Measure a step's peak over the bytes that were allocated `before` this variant was built."""
        torch.cuda.reset_peak_memory_stats()
        self._time(1)
        self.result.peak_bytes = torch.cuda.max_memory_allocated() - before

    def _time(self, steps: int) -> float:
        """Take steps and return the mean seconds of one on the slowest rank. Collective."""
        batches = [draw_batch(self._config, self._mesh, self._device, self._step + i) for i in range(steps)]
        gc.collect()
        gc.disable()  # as in training, where it runs between steps
        dist.barrier()
        start = time.perf_counter()
        losses = [self._variant.step(rows, labels) for rows, labels in batches]
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        seconds = torch.tensor((time.perf_counter() - start) / steps, dtype=torch.float64, device=self._device)
        gc.enable()
        self._step += steps
        self.result.losses += [self._mesh.sum(loss).item() for loss in losses]
        return self._mesh.max(seconds).item()


def draw_batch(config: Config, mesh: Mesh, device: torch.device, step: int) -> tuple[Microbatch, Tensor]:
    """Return this rank's random rows of a step, and how many labels all ranks have."""
    rows, seq_len = config.training.local_batch_size, config.training.seq_len
    random = np.random.default_rng([config.debug.seed, step, mesh.data_rank])
    tokens = torch.from_numpy(random.integers(build_shape(config).vocab_size, size=(rows, seq_len + 1))).to(device)
    labels = torch.tensor(float(rows * seq_len * mesh.data_ranks), device=device)
    return Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), labels


def measure_memory(config: Config, variants: Sequence[str], world_size: int) -> dict[str, int]:
    """Return the peak bytes of rank 0 of `world_size` ranks that aren't there, on the CPU, by variant.

    These are parameters, moments and what the variant keeps between steps, and the most that a step adds to them.
    """
    torch._dynamo.reset()  # it refuses to compile the same function for many models
    device = torch.device("cpu")
    with fake_process_group(world_size):
        mesh = build_mesh_of(config, device, world_size)
        return {name: _measure_peak(build_variant(name, config, mesh, device), config, mesh) for name in variants}


def _measure_peak(variant: Variant, config: Config, mesh: Mesh) -> int:
    rows, labels = draw_batch(config, mesh, torch.device("cpu"), step=0)
    for _ in range(WARM_UP_STEPS):
        variant.step(rows, labels)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        variant.step(rows, labels)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = variant.kept_bytes()
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak
