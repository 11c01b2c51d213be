"""Continuing a run: the checkpoint to continue from, and what its settings mean for those of this launch.

Needs no torch, so a launch that can't continue is refused at once. Loading the tensors is `begin.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint.folder import find_before, find_checkpoint, list_checkpoints
from trainer.checkpoint.manifest import DamagedError
from trainer.checkpoint.state import read_state
from trainer.config.check import check_config
from trainer.config.schema import Config, experiment_half, replace
from trainer.initial import check_initial

log = logging.getLogger(__name__)

DATASET = "training.dataset"  # under this name a checkpoint has what the tokens are


@dataclass(frozen=True)
class Resume:
    """The checkpoint to continue from, and what it says besides its tensors; nothing for a fresh start.

    `damaged` tells of newer ones that were passed over.
    """

    path: Path | None = None
    state: dict[str, Any] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()


def checkpoint_folder(config: Config) -> Path:
    """Return where the run's checkpoints lie."""
    return Path(config.job.dump_folder) / config.checkpoint.folder


def find_resume(config: Config) -> Resume:
    """Find the checkpoint that `config` continues from: the step asked for, or the newest whose state is whole.

    ValueError if it isn't there, if all are damaged, or if it can't be continued from. Tensors are verified when they
    are loaded.
    """
    if not config.checkpoint.enable:
        return Resume()
    path = find_checkpoint(checkpoint_folder(config), config.checkpoint.load_step)
    return read_resume(config, path) if path else Resume()


def read_resume(config: Config, path: Path, damaged: tuple[str, ...] = ()) -> Resume:
    """Read the state of the checkpoint `path`, or of the newest whole one before it if no step is asked for."""
    try:
        state = read_state(path)
    except DamagedError as error:
        return read_older(config, path, (*damaged, str(error)), error)
    if state.get("weights_only"):
        raise ValueError(
            f"{path} holds weights alone (checkpoint.last_save_model_only), so the run can't continue from it. Set "
            "checkpoint.load_step to an older step, or start a new run from it: another job.dump_folder, and "
            f"checkpoint.initial_load_path = {str(path)!r}"
        )
    return Resume(path, state, damaged)


def read_older(config: Config, path: Path, damaged: tuple[str, ...], error: DamagedError) -> Resume:
    """Read the newest whole checkpoint before `path`, which is damaged. Raises `error` where there may be none."""
    older = find_before(checkpoint_folder(config), path) if config.checkpoint.load_step == -1 else None
    if older is None:
        raise error
    return read_resume(config, older, damaged)


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
    initial = [] if resume.path else check_initial(config)
    return resume, changed + initial + check_config(config, world_size)


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


def warn_of_skipped(config: Config, resume: Resume) -> None:
    """Warn of what lies among the run's checkpoints and isn't a complete one."""
    for reason in resume.damaged:
        log.warning(f"a newer checkpoint is passed over: {reason}")
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
