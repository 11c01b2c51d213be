"""What can be known, or refused, before any process group exists.

`plan_launch` settles the settings with the newest checkpoint's facts, prepares the data and compares sizes with the
device. All that stands in the way is raised at once, as a ConfigError. Allocating is `build.py`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.config.check import check_config, dp_degrees, resolve_global_batch_size
from trainer.config.load import ConfigError
from trainer.config.schema import Config, experiment_half, replace
from trainer.data.prepare import Prepared, SourceError, encode, open_sources
from trainer.data.tokenizer import Tokenizer
from trainer.distributed import Place
from trainer.memory import MemoryEstimate, device_capacity_bytes, estimate_memory, format_bytes
from trainer.models.registry import FAMILIES, Family
from trainer.resume import Resume, check_experiment, fill_from_checkpoint, find_resume

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Launch:
    """What is known before any process group: settings with nothing left open, shapes, data, what to resume."""

    config: Config
    family: Family
    shape: Any
    prepared: Prepared
    resume: Resume

    @property
    def experiment(self) -> dict[str, Any]:
        """The experiment half, the content of the data included, as a checkpoint stores it."""
        return experiment_half(self.config) | {"training.dataset": f"sha256 {self.prepared.fingerprint}"}


def plan_launch(config: Config, place: Place) -> Launch:
    """Settle everything that needs no other rank. ConfigError lists all that stands in the way."""
    problems = _check_dump_folder(Path(config.job.dump_folder))
    try:
        resume = find_resume(config)
    except ValueError as error:
        raise ConfigError([*problems, str(error)]) from error
    config = fill_from_checkpoint(config, resume)
    impossible = check_config(config, place.world_size)
    if impossible:
        raise ConfigError(problems + impossible)
    config = _fill_from_launch(config, place.world_size)
    family, shape = FAMILIES[config.model.name], build_shape(config)
    problems += _check_memory(config, place)
    prepared = _prepare(config, shape, problems)
    launch = Launch(config, family, shape, prepared, resume)
    problems = check_experiment(launch.experiment, resume, accepted=set(config.checkpoint.accept_changes))
    if problems:
        raise ConfigError(problems)
    return launch


def _prepare(config: Config, shape: Any, problems: list[str]) -> Prepared:
    """Find the data's sources and encode them, which may take long and is not begun if there are `problems`."""
    training, cache = config.training, cache_folder(config)
    try:
        sources = open_sources(training.dataset, training.dataset_path, config.model.tokenizer_path, cache)
        problems = problems + _check_vocabulary(config, sources.tokenizer, shape)
        if problems:
            raise ConfigError(problems)
        return encode(sources, cache)
    except SourceError as error:
        raise ConfigError(problems + error.problems) from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    except OSError as error:
        raise ConfigError(
            [f"training.cache_folder = {str(cache)!r}: prepared tokens are kept there, and can't be ({error}). "
             "Free space, change the folder's permissions, or give another --training.cache_folder."]
        ) from error  # fmt: skip


def build_shape(config: Config) -> Any:
    """Return the shape object of the config's model."""
    changes = vars(config.model.args)
    return FAMILIES[config.model.name].build_config(config.model.name, config.model.flavor, changes)


def estimate_launch(config: Config, world_size: int) -> MemoryEstimate:
    """Estimate what one device must hold, from the settings alone. Errs on the low side: it may refuse a launch."""
    shape, family = build_shape(config), FAMILIES[config.model.name]
    tp = config.parallelism.tensor_parallel_degree
    keeps_gathered = config.parallelism.fsdp_reshard_after_forward == "never"
    # Gathered again in backward, parameters of about two blocks are whole at a time: one in use, one on its way.
    gathered = shape if keeps_gathered else dataclasses.replace(shape, n_layers=min(2, shape.n_layers))
    return estimate_memory(
        parameters=family.count_parameters(shape) // tp,
        gathered_parameters=family.count_parameters(gathered) // tp,
        shards=dp_degrees(config, world_size)[1],
        moments={"SGD": 1 if config.optimizer.momentum else 0}.get(config.optimizer.name, 2),
        storage_bytes=DTYPES[config.training.dtype].itemsize,
        compute_bytes=DTYPES[config.training.mixed_precision_param].itemsize,
        activations_bytes=_count_activation_bytes(config, family, shape) // tp,
    )


def _count_activation_bytes(config: Config, family: Family, shape: Any) -> int:
    """Estimate what a microbatch keeps for backward, between all and, recomputed in full, the inputs of blocks."""
    settings, compute_bytes = config.activation_checkpoint, DTYPES[config.training.mixed_precision_param].itemsize
    tokens = config.training.local_batch_size * config.training.seq_len
    everything = family.count_activation_bytes(shape, tokens, compute_bytes)
    one_block = family.count_activation_bytes(dataclasses.replace(shape, n_layers=1), tokens, compute_bytes)
    least = one_block + (shape.n_layers - 1) * tokens * shape.dim * compute_bytes
    kept_ratio = {
        "none": 1.0,
        "selective": _selective_ratio(settings.selective_ac_option),
        "full": 0.0,
        "memory_budget": settings.memory_budget,
    }[settings.mode]
    return int(least + (everything - least) * kept_ratio)


def _selective_ratio(option: str) -> float:
    """Return what selective recomputation keeps: all but every n-th block, or roughly half of each one's results."""
    return 1 - 1 / int(option) if option.isdecimal() else 0.5


def cache_folder(config: Config) -> Path:
    """Return where prepared data is kept: the setting, or fullgraph/ in the user's cache folder."""
    if config.training.cache_folder:
        return Path(config.training.cache_folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fullgraph"


def _check_dump_folder(folder: Path) -> list[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"writable")
    except OSError as error:
        return [
            f"job.dump_folder = {str(folder)!r}: the run must be able to write there, and can't ({error}). "
            "Free space, change the folder's permissions, or give another --job.dump_folder."
        ]
    return []


def _fill_from_launch(config: Config, world_size: int) -> Config:
    """Settle what is still left open. What only this machine decides stays as it is, for a launch on another one."""
    return replace(
        config,
        {
            "training.global_batch_size": resolve_global_batch_size(config, world_size),
            "lr_scheduler.total_steps": config.lr_scheduler.total_steps or config.training.steps,
        },
    )


def _check_memory(config: Config, place: Place) -> list[str]:
    estimate = estimate_launch(config, place.world_size)
    capacity = device_capacity_bytes(place.device, place.local_world_size)
    if estimate.total_bytes <= capacity:
        return []
    has = "the GPU has" if place.device.type == "cuda" else "of the memory available now a rank's share is"
    return [
        f"model.flavor = {config.model.flavor!r}, training.local_batch_size = {config.training.local_batch_size}, "
        f"training.seq_len = {config.training.seq_len} on {place.world_size} ranks\n"
        f"The run needs {estimate}, and {has} {format_bytes(capacity)}. "
        "Use more ranks, or lower one of the three."
    ]


def _check_vocabulary(config: Config, tokenizer: Tokenizer, shape: Any) -> list[str]:
    if tokenizer.vocab_size <= shape.vocab_size:
        return []
    return [
        f"model.args.vocab_size = {shape.vocab_size}: it must be at least the tokenizer's "
        f"{tokenizer.vocab_size} ids (model.tokenizer_path = {config.model.tokenizer_path!r}). Raise it, or "
        "use another tokenizer."
    ]
