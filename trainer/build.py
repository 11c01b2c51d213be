"""Assembling a run: first everything that can be known or refused without a process group, then everything else.

`plan_launch` reads the config, the newest checkpoint's facts, the data and the sizes, and raises ConfigError with all
that is wrong. `build_run` then allocates. Training itself is `loop.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.checkpoint.folder import find_checkpoint
from trainer.checkpoint.load import load_tensors, read_state
from trainer.checkpoint.rng import random_state, restore_random_state
from trainer.config import Config, experiment_half, replace
from trainer.config_check import accumulation_steps, check_config, dp_degrees, resolve_global_batch_size
from trainer.config_file import ConfigError
from trainer.data.batches import HeldOutData, TrainingData
from trainer.data.prepare import Prepared, prepare
from trainer.data.rows import Rows
from trainer.distributed import Place, check_agreement, host_group
from trainer.interrupt import Interrupt
from trainer.loss import sum_token_losses
from trainer.memory import GIB, MemoryEstimate, device_capacity_bytes, estimate_memory
from trainer.metrics import Metrics, build_metrics
from trainer.models.registry import FAMILIES, Family
from trainer.optim import Optimizer
from trainer.parallel.accumulate import Accumulate, build_accumulate
from trainer.parallel.compile import build_sum_losses, choose_backend
from trainer.parallel.mesh import Mesh, build_mesh
from trainer.parallel.parallelize import initialize, parallelize
from trainer.parallel.simple_fsdp import Precision
from trainer.peak_flops import Peak, peak_flops
from trainer.schedule import Schedule, build_schedule

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SAVE_TIMEOUT_SECONDS = 3600  # ranks wait for the slowest disk, not for the slowest collective


@dataclass(frozen=True)
class Launch:
    """What is known before any process group: settings with nothing left open, shapes, data, what to resume."""

    config: Config
    family: Family
    shape: Any
    prepared: Prepared
    resume_from: Path | None
    resume_state: dict[str, Any]

    @property
    def experiment(self) -> dict[str, Any]:
        """The experiment half, the content of the data included, as a checkpoint stores it."""
        return experiment_half(self.config) | {"training.dataset": f"sha256 {self.prepared.fingerprint}"}


@dataclass
class TrainState:
    """How far the run is. `non_finite` is 1 from the first step on whose loss or gradient norm was not finite."""

    step: int
    tokens_seen: Tensor
    non_finite: Tensor

    def mask_if_not_finite(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Mask this update and all later ones on the device, if a value isn't finite."""
        self.non_finite = torch.maximum(self.non_finite, (~torch.isfinite(loss + grad_norm)).float())

    def advance(self, tokens: Tensor) -> None:
        self.step += 1
        self.tokens_seen += tokens * (1 - self.non_finite).long()


@dataclass
class Run:
    """All that the loop works with."""

    config: Config
    launch: Launch
    place: Place
    mesh: Mesh
    model: nn.Module
    backend: str
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
    state: TrainState

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of a checkpoint by key, sharing memory with the run."""
        parameters = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        moments = {f"optimizer.{key}": value for key, value in self.optimizer.state_tensors().items()}
        return parameters | moments

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


def plan_launch(config: Config, place: Place) -> Launch:
    """Settle everything that needs no other rank. ConfigError lists all that stands in the way."""
    _check_dump_folder(Path(config.job.dump_folder))
    resume_from, resume_state = _find_resume(config)
    config = _fill_from_checkpoint(config, resume_state.get("experiment", {}))
    problems = check_config(config, place.world_size)
    if problems:
        raise ConfigError(problems)
    config = _fill_from_launch(config, place.world_size)
    family = FAMILIES[config.model.name]
    shape = build_shape(config)
    problems = _check_memory(config, place)
    try:
        prepared = prepare(
            config.training.dataset, config.training.dataset_path, config.model.tokenizer_path, cache_folder(config)
        )
    except ValueError as error:
        raise ConfigError([str(error), *problems]) from error
    launch = Launch(config, family, shape, prepared, resume_from, resume_state)
    problems += _check_vocabulary(config, prepared, shape)
    problems += _check_experiment(launch)
    if problems:
        raise ConfigError(problems)
    return launch


def build_shape(config: Config) -> Any:
    """Return the shape object of the config's model."""
    changes = vars(config.model.args)
    return FAMILIES[config.model.name].build_config(config.model.name, config.model.flavor, changes)


def estimate_launch(config: Config, world_size: int) -> MemoryEstimate:
    """Estimate what one device must hold, from the settings alone."""
    shape, family = build_shape(config), FAMILIES[config.model.name]
    compute_bytes = DTYPES[config.training.mixed_precision_param].itemsize
    moments = {"SGD": 1 if config.optimizer.momentum else 0}.get(config.optimizer.name, 2)
    tokens = config.training.local_batch_size * config.training.seq_len
    return estimate_memory(
        parameters=family.count_parameters(shape),
        shards=dp_degrees(config, world_size)[1],
        moments=moments,
        storage_bytes=DTYPES[config.training.dtype].itemsize,
        compute_bytes=compute_bytes,
        activations_bytes=family.count_activation_bytes(shape, tokens, compute_bytes),
    )


def cache_folder(config: Config) -> Path:
    """Return where prepared data is kept: the setting, or fullgraph/ in the user's cache folder."""
    if config.training.cache_folder:
        return Path(config.training.cache_folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fullgraph"


def _check_dump_folder(folder: Path) -> None:
    probe = folder / f".writable-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            [f"job.dump_folder = {str(folder)!r}: the run must be able to write there, and can't ({error}). "
             "Free space, change the folder's permissions, or give another --job.dump_folder."]
        ) from error  # fmt: skip


def _find_resume(config: Config) -> tuple[Path | None, dict[str, Any]]:
    if not config.checkpoint.enable:
        return None, {}
    try:
        path = find_checkpoint(checkpoint_folder(config), config.checkpoint.load_step)
        return path, read_state(path) if path else {}
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def checkpoint_folder(config: Config) -> Path:
    return Path(config.job.dump_folder) / config.checkpoint.folder


def _fill_from_checkpoint(config: Config, stored: dict[str, Any]) -> Config:
    """Settings left open take what the first launch made of them."""
    filled: dict[str, Any] = {}
    if config.training.global_batch_size == -1 and stored:
        filled["training.global_batch_size"] = stored["training.global_batch_size"]
    if config.lr_scheduler.total_steps is None and stored:
        filled["lr_scheduler.total_steps"] = stored["lr_scheduler.total_steps"]
    return replace(config, filled)


def _fill_from_launch(config: Config, world_size: int) -> Config:
    return replace(
        config,
        {
            "training.global_batch_size": resolve_global_batch_size(config, world_size),
            "lr_scheduler.total_steps": config.lr_scheduler.total_steps or config.training.steps,
            "parallelism.data_parallel_shard_degree": dp_degrees(config, world_size)[1],
        },
    )


def _check_memory(config: Config, place: Place) -> list[str]:
    estimate = estimate_launch(config, place.world_size)
    capacity = device_capacity_bytes(place.device, place.local_world_size)
    if estimate.total_bytes <= capacity:
        return []
    kind = "GPU" if place.device.type == "cuda" else "rank's share of the memory available now"
    return [
        f"model.flavor = {config.model.flavor!r} on {place.world_size} ranks needs {estimate}, and a {kind} has "
        f"{capacity / GIB:.2f} GiB. Use more ranks, a smaller model.flavor, training.local_batch_size (now "
        f"{config.training.local_batch_size}) or training.seq_len (now {config.training.seq_len})."
    ]


def _check_vocabulary(config: Config, prepared: Prepared, shape: Any) -> list[str]:
    if prepared.tokenizer.vocab_size <= shape.vocab_size:
        return []
    return [
        f"model.args.vocab_size = {shape.vocab_size}: it must be at least the tokenizer's {prepared.tokenizer.vocab_size} "
        f"ids (model.tokenizer_path = {config.model.tokenizer_path!r}). Raise it, or use another tokenizer."
    ]


def _check_experiment(launch: Launch) -> list[str]:
    """Compare the experiment half with the checkpoint's. Changes must be accepted by name."""
    stored = launch.resume_state.get("experiment")
    accepted = set(launch.config.checkpoint.accept_changes)
    if stored is None:
        return []
    now = launch.experiment
    changed = sorted(name for name in now.keys() | stored.keys() if now.get(name) != stored.get(name))
    idle = accepted - set(changed)
    if idle:
        log.warning(f"checkpoint.accept_changes names settings that have not changed: {sorted(idle)}")
    return [
        f"{name} = {now.get(name)!r} differs from {stored.get(name)!r} in {launch.resume_from}, and belongs to the "
        f"experiment. Set it back, start anew in another --job.dump_folder, or accept the change with "
        f"--checkpoint.accept_changes {','.join(sorted(accepted | {name}))}"
        for name in changed
        if name not in accepted
    ]


def build_run(launch: Launch, place: Place) -> Run:
    """Allocate model, optimizer and all else, and load the checkpoint to resume from. Collective over all ranks."""
    config, shape = launch.config, launch.shape
    host, saving = host_group(config.comm.init_timeout_seconds), host_group(SAVE_TIMEOUT_SECONDS)
    check_agreement("The content of training.dataset and the tokenizer", launch.prepared.fingerprint, host)
    check_agreement("The checkpoint to resume from", str(launch.resume_from and launch.resume_from.name), host)
    torch.manual_seed(config.debug.seed + place.rank)
    torch.use_deterministic_algorithms(config.debug.deterministic)

    mesh = _mesh_of(config, place.device, place.world_size)
    with torch.device("meta"):
        model = launch.family.build_model(shape).to(DTYPES[config.training.dtype])
    parallelize(model, mesh, precision=_precision(config))
    initialize(model, place.device, launch.family.initial_std(shape), config.debug.seed)
    backend = _choose_backend(config, place)
    sum_losses = build_sum_losses(
        model,
        sum_token_losses,
        enable=config.compile.enable,
        backend=backend,
        loss_inside="loss" in config.compile.components,
    )
    resume_step = launch.resume_state.get("step", 0)
    run = Run(
        config=config,
        launch=launch,
        place=place,
        mesh=mesh,
        model=model,
        backend=backend,
        sum_losses=sum_losses,
        accumulate=build_accumulate(sum_losses),
        optimizer=_build_optimizer(config, model),
        schedule=schedule_of(config),
        data=_build_data(config, launch.prepared, mesh),
        held_out=_build_held_out(config, launch.prepared, mesh),
        metrics=_build_metrics(launch, place, resume_step),
        interrupt=Interrupt(host),
        host_group=host,
        save_group=saving,
        state=TrainState(
            step=resume_step,
            tokens_seen=torch.tensor(launch.resume_state.get("tokens_seen", 0), device=place.device),
            non_finite=torch.zeros((), device=place.device),
        ),
    )
    if launch.resume_from:
        _load(run, launch.resume_from)
    return run


def _precision(config: Config) -> Precision:
    return Precision(DTYPES[config.training.mixed_precision_param], DTYPES[config.training.mixed_precision_reduce])


def _mesh_of(config: Config, device: torch.device, world_size: int) -> Mesh:
    replicate, shard = dp_degrees(config, world_size)
    return build_mesh(device, dp_replicate=replicate, dp_shard=shard)


def _choose_backend(config: Config, place: Place) -> str:
    if not config.compile.enable:
        return "eager"
    backend, reason = choose_backend(config.compile.backend, place.device)
    if reason:
        log.warning(f"compile.backend = 'inductor' has no working C++ toolchain here ({reason}); using {backend!r}")
    return backend


def _build_optimizer(config: Config, model: nn.Module) -> Optimizer:
    settings = config.optimizer
    return Optimizer(
        dict(model.named_parameters()),
        name=settings.name,
        weight_decay=settings.weight_decay,
        no_decay=settings.no_decay,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        momentum=settings.momentum,
    )


def schedule_of(config: Config) -> Schedule:
    """Build the schedule of a config whose total_steps, if left open, is training.steps."""
    settings = config.lr_scheduler
    return build_schedule(
        peak=config.optimizer.lr,
        warmup_steps=settings.warmup_steps,
        total_steps=settings.total_steps or config.training.steps,
        decay_ratio=settings.decay_ratio,
        decay_type=settings.decay_type,
        min_lr_factor=settings.min_lr_factor,
    )


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
        device=place.device,
        ranks=place.world_size,
        color=not config.metrics.disable_color_printing,
    )


def _peak(config: Config, place: Place) -> Peak:
    if config.metrics.peak_tflops:
        return Peak(config.metrics.peak_tflops * 1e12, "metrics.peak_tflops")
    return peak_flops(place.device, DTYPES[config.training.mixed_precision_param])


def random_keys(rank: int) -> dict[str, Tensor]:
    """The random state of this rank under keys of its own."""
    return {f"rng.rank_{rank}.{name}": value for name, value in random_state().items()}


def _load(run: Run, path: Path) -> None:
    """Continue from a checkpoint of any mesh; ranks it didn't have keep a fresh random state. Collective."""
    rng = random_keys(run.place.rank)

    def is_random(key: str) -> bool:
        return key.startswith("rng.")

    tensors = run.tensors() | rng
    load_tensors(path, tensors, allow_missing=is_random, allow_extra=is_random, process_group=run.save_group)
    restore_random_state({key.rsplit(".", 1)[1]: value for key, value in rng.items()})
    log.info(f"Resuming from {path}: step {run.state.step} is done, {int(run.state.tokens_seen):,} tokens seen")


def describe(config: Config, mesh: Mesh, model: nn.Module, world_size: int) -> list[str]:
    """Say in a few lines what will run: model, mesh, shards, batch and memory."""
    shape, family = build_shape(config), FAMILIES[config.model.name]
    training = config.training
    local_numbers = sum(p.to_local().numel() for p in model.parameters())
    rows = resolve_global_batch_size(config, world_size)
    kinds = sorted({str(p.placements) for p in model.parameters()})
    return [
        f"Model {config.model.name} {config.model.flavor}: {family.count_parameters(shape):,} parameters, "
        f"{family.count_flops_per_token(shape, training.seq_len) / 1e9:,.2f} GFLOP per token",
        f"Mesh {mesh}; {local_numbers:,} parameters on this rank, placed {', '.join(kinds)} over {mesh.data}",
        f"Precision: parameters and moments {training.dtype}, compute {training.mixed_precision_param}, "
        f"gradient sums {training.mixed_precision_reduce}, loss and norm float32",
        f"Batch: {training.local_batch_size} rows x {mesh.data_ranks} data ranks x "
        f"{accumulation_steps(config, world_size)} accumulated = {rows} rows of {training.seq_len} = "
        f"{rows * training.seq_len:,} tokens per step",
        f"Memory estimate: {estimate_launch(config, world_size)}",
    ]


def describe_dry_run(config: Config, world_size: int) -> list[str]:
    """Describe rank 0 of `world_size` ranks, its model on the meta device. Needs a fake process group."""
    mesh = _mesh_of(config, torch.device("cpu"), world_size)
    with torch.device("meta"):
        model = FAMILIES[config.model.name].build_model(build_shape(config)).to(DTYPES[config.training.dtype])
    parallelize(model, mesh, precision=_precision(config))
    shapes = {name: (tuple(p.shape), tuple(p.to_local().shape)) for name, p in model.named_parameters()}
    table = [f"  {name:40} {whole!s:>18} -> {mine!s:>18} on this rank" for name, (whole, mine) in shapes.items()]
    repeated = [line for line in table if not line.lstrip().startswith("layers.") or " layers.0." in line]
    return [
        *describe(config, mesh, model, world_size),
        "Parameters (blocks after the first have the same shapes):",
        *repeated,
    ]
