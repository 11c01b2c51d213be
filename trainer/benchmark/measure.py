"""Measuring variants side by side: in every round each takes a few steps, so that drift of the machine hits all.

Time is taken on real ranks. Memory on CPUs is taken apart, from the profiler's allocation events on a fake process
group: gloo frees buffers in threads of its own, whose events the profiler doesn't see.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.profiler import ProfilerActivity, profile

from trainer.benchmark.variants import Setup, Variant, build_variant
from trainer.config.schema import Config
from trainer.data.batches import Microbatch
from trainer.distributed import Place, fake_process_group, host_group
from trainer.memory import device_capacity_bytes
from trainer.models.registry import build_shape
from trainer.parallel.overlap.hardware import Hardware
from trainer.parallel.overlap.measure import find_hardware_of_run
from trainer.parts import build_mesh_of

WAIT_SECONDS = 3600  # ranks wait for the one whose compiler works longest
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


def find_hardware(place: Place) -> Hardware:
    """Collective over all ranks. Return what describes them, measured now where no table has it."""
    capacity = device_capacity_bytes(place.device, place.local_world_size)
    with tempfile.TemporaryDirectory() as folder:  # so nothing is kept for another run
        return find_hardware_of_run(place.device, Path(folder), capacity, host_group(WAIT_SECONDS))


def measure(setup: Setup, variants: Sequence[str], *, steps: int, rounds: int) -> list[Measurement]:
    """Collective over all ranks. Train every variant in turns and return its measurements.

    Seconds are those of the slowest rank, and the losses the same on all.
    """
    is_cuda = setup.device.type == "cuda"
    trainees = {}
    for name in variants:
        before = torch.cuda.memory_allocated() if is_cuda else 0
        trainees[name] = Trainee(name, setup)
        trainees[name].warm_up()
        if is_cuda:
            trainees[name].measure_cuda_memory(before)
    for turn in list_turns(variants, rounds):
        for name in turn:
            trainees[name].take(steps)
    return [trainee.result for trainee in trainees.values()]


class Trainee:
    """A variant that takes steps, each on random tokens of its own: the same for all variants."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.result = Measurement(name)
        self._setup = setup
        self._variant = build_variant(name, setup)
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
        """Collective over all ranks. Take steps and return the mean seconds of one on the slowest rank."""
        mesh, device = self._setup.mesh, self._setup.device
        batches = [draw_batch(self._setup, self._step + i) for i in range(steps)]
        gc.collect()
        gc.disable()  # as in training, where it runs between steps
        dist.barrier()
        start = time.perf_counter()
        losses = [self._variant.step(rows, labels) for rows, labels in batches]
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = torch.tensor((time.perf_counter() - start) / steps, dtype=torch.float64, device=device)
        gc.enable()
        self._step += steps
        self.result.losses += [mesh.sum(loss).item() for loss in losses]
        return mesh.max(seconds).item()


def draw_batch(setup: Setup, step: int) -> tuple[Microbatch, Tensor]:
    """Return this rank's random rows of a step, and how many labels all ranks have."""
    config, mesh, device = setup.config, setup.mesh, setup.device
    rows, seq_len = config.training.local_batch_size, config.training.seq_len
    random = np.random.default_rng([config.debug.seed, step, mesh.data_rank])
    tokens = torch.from_numpy(random.integers(build_shape(config).vocab_size, size=(rows, seq_len + 1))).to(device)
    labels = torch.tensor(float(rows * seq_len * mesh.data_ranks), device=device)
    return Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), labels


def measure_memory(
    config: Config, variants: Sequence[str], world_size: int, hardware: Hardware | None = None
) -> dict[str, int]:
    """Return the peak bytes of rank 0 of `world_size` ranks that aren't there, on the CPU, by variant.

    These are parameters, moments and what the variant keeps between steps, and the most that a step adds to them.
    A new process measures, so that nothing of the timed variants is left in it.
    """
    threads = torch.get_num_threads()
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (threads,)) as process:
        return process.submit(_measure_peaks, config, variants, world_size, hardware).result()


def _measure_peaks(
    config: Config, variants: Sequence[str], world_size: int, hardware: Hardware | None
) -> dict[str, int]:
    device = torch.device("cpu")
    # A cached graph names the process groups it was compiled for, which are gone; compiled kernels are still reused.
    with fake_process_group(world_size), inductor_config.patch(force_disable_caches=True):
        setup = Setup(config, build_mesh_of(config, device, world_size), device, hardware)
        return {name: _measure_peak(build_variant(name, setup), setup) for name in variants}


def _measure_peak(variant: Variant, setup: Setup) -> int:
    batch = draw_batch(setup, step=0)
    for _ in range(WARM_UP_STEPS):
        variant.step(*batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        variant.step(*batch)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = variant.kept_bytes()
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak
