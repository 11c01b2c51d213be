"""What can be known, or refused, before any process group exists.

`plan_launch` settles the settings with the newest checkpoint's facts, prepares the data and compares sizes with the
device. All that stands in the way is raised at once, as a ConfigError. Allocating is `build.py`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.folder import find_checkpoint
from trainer.checkpoint.load import read_state
from trainer.config import Config, experiment_half, replace
from trainer.config_check import check_config, dp_degrees, resolve_global_batch_size
from trainer.config_file import ConfigError
from trainer.data.prepare import Prepared, prepare
from trainer.distributed import Place
from trainer.memory import GIB, MemoryEstimate, device_capacity_bytes, estimate_memory
from trainer.models.registry import FAMILIES, Family

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
    training = config.training
    try:
        prepared = prepare(training.dataset, training.dataset_path, config.model.tokenizer_path, cache_folder(config))
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
        f"model.args.vocab_size = {shape.vocab_size}: it must be at least the tokenizer's "
        f"{prepared.tokenizer.vocab_size} ids (model.tokenizer_path = {config.model.tokenizer_path!r}). Raise it, or "
        "use another tokenizer."
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
    refused = [f"{name}: {now.get(name)!r} now, {stored.get(name)!r} there" for name in changed if name not in accepted]
    if not refused:
        return []
    return [
        f"These settings decide the numbers of the experiment and differ from {launch.resume_from}:\n"
        + "\n".join(refused)
        + "\nSet them back, start anew in another --job.dump_folder, or accept them by name with "
        f"--checkpoint.accept_changes {','.join(changed)}"
    ]
