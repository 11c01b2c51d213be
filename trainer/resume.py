"""Continuing a run: the checkpoint to continue from, and what its settings mean for those of this launch.

Needs no torch, so a launch that can't continue is refused at once. Loading the tensors is `build.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint.folder import find_checkpoint, list_checkpoints
from trainer.checkpoint.state import read_state
from trainer.config.check import check_config
from trainer.config.schema import Config, experiment_half, replace

log = logging.getLogger(__name__)

DATASET = "training.dataset"  # under this name a checkpoint has what the tokens are


@dataclass(frozen=True)
class Resume:
    """The checkpoint to continue from, and what it says besides its tensors; nothing for a fresh start."""

    path: Path | None = None
    state: dict[str, Any] = field(default_factory=dict)


def checkpoint_folder(config: Config) -> Path:
    """Return where the run's checkpoints lie."""
    return Path(config.job.dump_folder) / config.checkpoint.folder


def find_resume(config: Config) -> Resume:
    """Find the checkpoint that `config` continues from. ValueError if it isn't there or is damaged."""
    if not config.checkpoint.enable:
        return Resume()
    path = find_checkpoint(checkpoint_folder(config), config.checkpoint.load_step)
    return Resume(path, read_state(path)) if path else Resume()


def fill_from_checkpoint(config: Config, resume: Resume) -> Config:
    """Give settings that are left open what the first launch made of them."""
    stored = resume.state.get("experiment", {})
    open_settings = {
        "training.global_batch_size": config.training.global_batch_size == -1,
        "lr_scheduler.total_steps": config.lr_scheduler.total_steps is None,
    }
    return replace(config, {name: stored[name] for name, is_open in open_settings.items() if is_open and stored})


def check_launch(config: Config, world_size: int) -> tuple[Resume, list[str]]:
    """Find the checkpoint to continue from, and what makes the settings impossible, alone or beside its own.

    What the tokens are is compared later, by `plan_launch`: it takes the data.
    """
    try:
        resume = find_resume(config)
    except ValueError as error:
        return Resume(), [str(error), *check_config(config, world_size)]
    config = fill_from_checkpoint(config, resume)
    now = {name: value for name, value in experiment_half(config).items() if name != DATASET}
    changed = check_experiment(now, resume, set(config.checkpoint.accept_changes))
    return resume, changed + check_config(config, world_size)


def check_experiment(now: dict[str, Any], resume: Resume, accepted: set[str]) -> list[str]:
    """Compare the experiment half `now` with the checkpoint's, and return what differs and isn't accepted by name."""
    stored = resume.state.get("experiment", {})
    changed = _changed(now, resume)
    refused = [f"{name}: {now.get(name)!r} now, {stored.get(name)!r} there" for name in changed if name not in accepted]
    if not refused:
        return []
    return [
        f"These settings decide the numbers of the experiment and differ from {resume.path}:\n"
        + "\n".join(refused)
        + "\nSet them back, start anew in another --job.dump_folder, or accept them by name with "
        f"--checkpoint.accept_changes {','.join(sorted(accepted.union(changed)))}"
    ]


def warn_of_skipped(config: Config) -> None:
    """Warn of what lies among the run's checkpoints and isn't a complete one."""
    if config.checkpoint.enable:
        for name, reason in list_checkpoints(checkpoint_folder(config)).skipped:
            log.warning(f"checkpoint {name} is skipped: {reason}")


def warn_of_idle(now: dict[str, Any], resume: Resume, accepted: set[str]) -> None:
    """Warn of changes that are accepted and not there. `now` is the whole experiment half."""
    idle = accepted.difference(_changed(now, resume))
    if idle and resume.path:
        log.warning(f"checkpoint.accept_changes names settings that have not changed: {sorted(idle)}")


def _changed(now: dict[str, Any], resume: Resume) -> list[str]:
    stored = resume.state.get("experiment")
    if stored is None:
        return []
    names = now.keys() | stored.keys()
    if DATASET not in now:  # the data isn't prepared yet
        names.discard(DATASET)
    # A checkpoint from before a setting existed was made with what is its default.
    before = experiment_half(Config()) | stored
    return sorted(name for name in names if now.get(name) != before.get(name))
