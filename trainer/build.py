"""Assembling a run from a launch: mesh, model, optimizer, data, metrics, and the state that it begins with.

What needs no process group is settled before, in `launch.py`; training itself is `loop.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.begin import begin
from trainer.checkpoint.folder import remove_old
from trainer.checkpoint.rng import seed_random
from trainer.checkpoint.saver import Saver
from trainer.config.schema import Config
from trainer.data.batches import HeldOutData, TrainingData
from trainer.data.prepare import Prepared
from trainer.data.rows import Rows
from trainer.distributed import Place, check_agreement, gather_objects, host_group, set_determinism, set_timeout
from trainer.dtypes import DTYPES
from trainer.interrupt import Interrupt
from trainer.launch import Launch
from trainer.memory import device_capacity_bytes
from trainer.metrics.peak_flops import Peak, listed_peak_flops, peak_flops
from trainer.metrics.writer import Metrics, build_metrics
from trainer.optim import Optimizer
from trainer.parallel.accumulate import Accumulate, Reading, build_accumulate
from trainer.parallel.graph_report import GraphReport, Order, check_order
from trainer.parallel.mesh import Mesh
from trainer.parallel.overlap.hardware import Hardware
from trainer.parallel.overlap.measure import find_hardware_of_run
from trainer.parallel.parallelize import initialize
from trainer.parallel.self_test import check_collectives
from trainer.parallel.toolchain import choose_backend
from trainer.parts import (
    build_mesh_of,
    build_optimizer_of,
    build_reading_of,
    build_sharded_model,
    build_sum_losses_of,
)
from trainer.resume import checkpoint_folder
from trainer.schedule import Schedule, build_schedule_of
from trainer.state import TrainState

log = logging.getLogger(__name__)

SAVE_TIMEOUT_SECONDS = 3600  # ranks wait for the slowest disk, not for the slowest collective


@dataclass
class Run:
    """All that the loop works with."""

    config: Config
    launch: Launch
    place: Place
    mesh: Mesh
    model: nn.Module
    backend: str
    graph_reports: list[GraphReport]
    reading: Reading
    sum_losses: Callable[[Tensor, Tensor], Tensor]
    accumulate: Accumulate
    optimizer: Optimizer
    schedule: Schedule
    data: TrainingData
    held_out: HeldOutData | None
    metrics: Metrics
    interrupt: Interrupt
    host_group: dist.ProcessGroup
    save_group: dist.ProcessGroup
    saver: Saver
    state: TrainState

    def describe_state(self) -> dict[str, Any]:
        """What a checkpoint says besides its tensors, as JSON."""
        return {
            "step": self.state.step,
            "tokens_seen": int(self.state.tokens_seen),
            "experiment": self.launch.experiment,
            "world_size": self.place.world_size,
            "mesh": str(self.mesh),
            "torch": torch.__version__,
        }

    @property
    def tokens_per_step(self) -> int:
        return self.config.training.global_batch_size * self.config.training.seq_len


def build_run(launch: Launch, place: Place) -> Run:
    """Collective over all ranks. Allocate model, optimizer and all else, and load the checkpoint to resume from."""
    config = launch.config
    host, saving = host_group(config.comm.init_timeout_seconds), host_group(SAVE_TIMEOUT_SECONDS)
    check_agreement("The content of training.dataset and the tokenizer", launch.prepared.fingerprint, host)
    check_agreement("The checkpoint to resume from", str(launch.resume.path and launch.resume.path.name), host)
    seed_random(config.debug.seed + place.rank)
    set_determinism(config.debug.deterministic)

    mesh = build_mesh_of(config, place.device, place.world_size)
    set_timeout(config.comm.init_timeout_seconds, mesh.groups())
    check_collectives(mesh, place.device)
    model = build_sharded_model(config, mesh)
    initialize(model, place.device, launch.family.initial_std(launch.shape), config.debug.seed)
    backend = _choose_backend(config, place, host)
    hardware = _find_hardware(config, place, mesh, host)

    def agree(order: Order) -> None:
        check_order(order, host)

    of_step, of_gather, of_sum = reports = [GraphReport(mesh.axis_of_group()) for _ in range(3)]
    sum_losses = build_sum_losses_of(config, mesh, model, backend, of_step, hardware, agree)
    reading = build_reading_of(config, mesh, model, backend, of_gather, of_sum, hardware, agree)
    optimizer = build_optimizer_of(config, model)
    state = TrainState.start(place.device)
    begin(launch, place, model, optimizer, state, saving)
    return Run(
        config=config,
        launch=launch,
        place=place,
        mesh=mesh,
        model=model,
        backend=backend,
        graph_reports=reports if config.parallelism.fsdp_gather_once else [of_step],
        reading=reading,
        sum_losses=sum_losses,
        accumulate=build_accumulate(sum_losses, reading),
        optimizer=optimizer,
        schedule=build_schedule_of(config),
        data=_build_data(config, launch.prepared, mesh),
        held_out=_build_held_out(config, launch.prepared, mesh),
        metrics=_build_metrics(launch, place, state.step),
        interrupt=Interrupt(host),
        host_group=host,
        save_group=saving,
        saver=_build_saver(config, saving),
        state=state,
    )


def _choose_backend(config: Config, place: Place, group: dist.ProcessGroup) -> str:
    """Collective over `group`. Return what runs the graph, the same on all ranks, as the collectives must be."""
    if not config.compile.enable:
        return "eager"
    choices = gather_objects(choose_backend(config.compile.backend), group)
    refused = {rank: (backend, reason) for rank, (backend, reason) in enumerate(choices) if reason}
    if not refused:
        return config.compile.backend
    rank, (backend, reason) = next(iter(refused.items()))
    if place.rank == 0:
        log.warning(
            f"compile.backend = {config.compile.backend!r} has no working C++ toolchain on rank {rank} ({reason}); "
            f"using {backend!r}, which computes the same, slower"
        )
    return backend


def _find_hardware(config: Config, place: Place, mesh: Mesh, group: dist.ProcessGroup) -> Hardware | None:
    """Collective over all ranks. Return what plans are forecast on, or None where no plan is made."""
    if not config.compile.enable or mesh.data_ranks == 1:
        return None
    capacity = device_capacity_bytes(place.device, place.local_world_size)
    return find_hardware_of_run(place.device, Path(config.job.dump_folder), capacity, group)


def _build_data(config: Config, prepared: Prepared, mesh: Mesh) -> TrainingData:
    return TrainingData(
        Rows(prepared.training.tokens, config.training.seq_len),
        seed=config.debug.seed,
        global_batch_size=config.training.global_batch_size,
        local_batch_size=config.training.local_batch_size,
        data_rank=mesh.data_rank,
        data_ranks=mesh.data_ranks,
    )


def _build_held_out(config: Config, prepared: Prepared, mesh: Mesh) -> HeldOutData | None:
    if not config.validation.enable:
        return None
    return HeldOutData(
        Rows(prepared.held_out.tokens, config.training.seq_len),
        local_batch_size=config.training.local_batch_size,
        data_rank=mesh.data_rank,
        data_ranks=mesh.data_ranks,
        max_rows=config.validation.max_rows or None,
    )


def _build_metrics(launch: Launch, place: Place, resume_step: int) -> Metrics:
    config = launch.config
    return build_metrics(
        folder=Path(config.job.dump_folder),
        tb_folder=config.metrics.save_tb_folder,
        enable_tensorboard=config.metrics.enable_tensorboard,
        writes=place.rank == 0,
        resume_step=resume_step,
        log_freq=config.metrics.log_freq,
        total_steps=config.training.steps,
        flops_per_token=launch.family.count_flops_per_token(launch.shape, config.training.seq_len),
        peak=_peak(config, place),
        float8_peak=_float8_peak(config, place),
        device=place.device,
        ranks=place.world_size,
        color=not config.metrics.disable_color_printing,
    )


def _build_saver(config: Config, group: dist.ProcessGroup) -> Saver:
    folder, settings = checkpoint_folder(config), config.checkpoint
    return Saver(
        folder,
        mode=settings.async_mode,
        retire=lambda step: remove_old(folder, settings.keep_latest_k, keep_every=settings.keep_every, keep=step),
        process_group=group,
    )


def _peak(config: Config, place: Place) -> Peak:
    if config.metrics.peak_tflops:
        return Peak(config.metrics.peak_tflops * 1e12, "metrics.peak_tflops")
    return peak_flops(place.device, DTYPES[config.training.mixed_precision_param])


def _float8_peak(config: Config, place: Place) -> Peak | None:
    """Return what the device does at best in float8, where layers are float8 and the table has it."""
    if not config.model.is_float8:
        return None
    peak = listed_peak_flops(place.device, torch.float8_e4m3fn)
    if peak is None and place.rank == 0:
        log.info(
            f"The float8 peak of {place.device} is not known: there is no mfu_float8, and mfu is of the peak in "
            f"{config.training.mixed_precision_param}"
        )
    return peak
