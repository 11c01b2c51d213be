"""What can be known, or refused, before any process group exists.

`plan_launch` settles the settings, prepares the data and compares sizes with the device. All that stands in the way is
raised at once, as a ConfigError. What is wrong between settings was found before, in `resume.py`; allocating is
`build.py`.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.saver import ASYNC, ASYNC_PINNED
from trainer.config.check import resolve_global_batch_size
from trainer.config.load import ConfigError
from trainer.config.schema import Config, experiment_half, replace
from trainer.data.prepare import Prepared, SourceError, encode, open_sources
from trainer.data.tokenizer import Tokenizer
from trainer.distributed import Place
from trainer.fit import check_memory
from trainer.models.registry import FAMILIES, Family, build_shape
from trainer.parts import find_missing_float8_of, refuse_float8
from trainer.resume import DATASET, Resume, check_experiment, fill_from_checkpoint, warn_of_idle, warn_of_skipped

log = logging.getLogger(__name__)


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
        return experiment_half(self.config) | {DATASET: f"sha256 {self.prepared.fingerprint}"}


def plan_launch(config: Config, place: Place, resume: Resume) -> Launch:
    """Settle everything that needs no other rank; `resume.check_launch` has nothing against `config` and `resume`.

    ConfigError lists all that stands in the way.
    """
    config = _fill_from_launch(fill_from_checkpoint(config, resume), place.world_size)
    family, shape = FAMILIES[config.model.name], build_shape(config)
    problems = [
        *_check_dump_folder(Path(config.job.dump_folder)),
        *check_memory(config, place),
        *_check_async_mode(config, place),
        *_check_float8(config, place),
    ]
    launch = Launch(config, family, shape, _prepare(config, shape, problems), resume)
    accepted = set(config.checkpoint.accept_changes)
    problems = check_experiment(launch.experiment, resume, accepted)
    if problems:
        raise ConfigError(problems)
    if place.rank == 0:  # all ranks find the same
        warn_of_skipped(config, resume)
        warn_of_idle(launch.experiment, resume, accepted)
    return launch


def _prepare(config: Config, shape: Any, problems: list[str]) -> Prepared:
    """Find the data's sources and encode them, which may take long and is not begun if there are `problems`."""
    cache = cache_folder(config)
    with _told_after(problems):
        sources = open_sources(
            config.training.dataset, config.training.dataset_path, config.model.tokenizer_path, cache
        )
    problems = problems + _check_vocabulary(config, sources.tokenizer, shape)
    if problems:
        raise ConfigError(problems)
    with _told_after([]):
        return encode(sources, cache)


@contextmanager
def _told_after(problems: list[str]) -> Iterator[None]:
    """Make a ConfigError of `problems` and of what goes wrong with the data inside."""
    try:
        yield
    except SourceError as error:
        raise ConfigError(problems + error.problems) from error
    except (ValueError, OSError) as error:
        raise ConfigError([*problems, str(error)]) from error


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


def _check_async_mode(config: Config, place: Place) -> list[str]:
    if config.checkpoint.async_mode != ASYNC_PINNED or place.device.type == "cuda":
        return []
    return [
        f'checkpoint.async_mode = "{ASYNC_PINNED}": only a GPU\'s memory is copied through pinned memory, and this run '
        f'trains on {place.device}. Use checkpoint.async_mode = "{ASYNC}", which copies to ordinary memory.'
    ]


def _check_float8(config: Config, place: Place) -> list[str]:
    """Refuse a GPU without float8; a CPU without emulates it, and says so."""
    missing = find_missing_float8_of(config, place.device)
    if missing and place.device.type != "cpu":
        return [refuse_float8(config, missing)]
    if missing and place.rank == 0:
        log.warning(f"float8 is emulated: {missing}")
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


def _check_vocabulary(config: Config, tokenizer: Tokenizer, shape: Any) -> list[str]:
    if tokenizer.vocab_size <= shape.vocab_size:
        return []
    return [
        f"model.args.vocab_size = {shape.vocab_size}: it must be at least the tokenizer's "
        f"{tokenizer.vocab_size} ids (model.tokenizer_path = {config.model.tokenizer_path!r}). Raise it, or "
        "use another tokenizer."
    ]
