"""The state that a run begins with: that of a checkpoint, given weights with all else new, or all new.

What there is to begin with was found by `resume.py` and `initial.py`, which need no torch.
"""

from __future__ import annotations

import logging

import torch.distributed as dist
from torch import Tensor, nn

from trainer.checkpoint.folder import set_aside
from trainer.checkpoint.hf_load import load_hf_parameters
from trainer.checkpoint.load import load_tensors
from trainer.checkpoint.manifest import DamagedError
from trainer.checkpoint.rng import restore_random_state
from trainer.checkpoint.together import gather_everywhere, is_first, run_together
from trainer.config.load import ConfigError
from trainer.distributed import Place
from trainer.initial import find_initial
from trainer.launch import Launch
from trainer.optim import Optimizer
from trainer.resume import Resume, check_experiment, read_older
from trainer.state import TrainState, checkpoint_tensors, random_tensors

log = logging.getLogger(__name__)


def begin(
    launch: Launch, place: Place, model: nn.Module, optimizer: Optimizer, state: TrainState, group: dist.ProcessGroup
) -> None:
    """Collective over `group`. Fill model, optimizer and state in place with what the run begins with. ConfigError."""
    if launch.resume.path:
        _resume(launch, place, checkpoint_tensors(model, optimizer), state, group)
    else:
        _start(launch, model, group)


def _resume(
    launch: Launch, place: Place, tensors: dict[str, Tensor], state: TrainState, group: dist.ProcessGroup
) -> None:
    """Collective over `group`. Load a checkpoint of any mesh; ranks it didn't have keep a fresh random state.

    Where its bytes aren't those that were saved, the newest whole one before it is taken, unless a step was asked for.
    """
    resume, rng = launch.resume, random_tensors(place.rank)
    while True:
        assert resume.path is not None
        try:
            load_tensors(
                resume.path,
                tensors | rng,
                allow_missing=_is_random,
                allow_extra=_is_random,
                exclude=launch.config.checkpoint.exclude_from_loading,
                process_group=group,
            )
            break
        except DamagedError as error:  # raised on every rank, before any tensor was touched
            resume = _fall_back(launch, resume, error, group)
        except ValueError as error:
            raise ConfigError([str(error)]) from error
    restore_random_state({key.rsplit(".", 1)[1]: value for key, value in rng.items()})
    state.step = resume.state["step"]
    state.tokens_seen.fill_(resume.state["tokens_seen"])
    log.info(f"Resuming from {resume.path}: step {state.step} is done, {int(state.tokens_seen):,} tokens seen")
    if launch.config.checkpoint.initial_load_path:
        log.info("checkpoint.initial_load_path is not read: it is for a start without a checkpoint")


def _is_random(key: str) -> bool:
    return key.startswith("rng.")


def _fall_back(launch: Launch, damaged: Resume, error: DamagedError, group: dist.ProcessGroup) -> Resume:
    """Collective over `group`. Return what to continue from in the place of a damaged checkpoint, which is renamed."""
    config, first = launch.config, is_first(group)
    path = damaged.path
    assert path is not None

    def choose() -> Resume | None:
        if not first:
            return None
        older = read_older(config, path, (), error)
        if check_experiment(launch.experiment, older, set(config.checkpoint.accept_changes)):
            raise ValueError(f"{error}. The one before it, {older.path}, has other settings")
        # Under its name it would count as the newest, and the whole ones as superseded.
        set_aside(path)
        return older

    try:
        (older, *_) = gather_everywhere(run_together("falling back", choose, group), group)
    except ValueError as refused:
        raise ConfigError([str(refused)]) from refused
    log.warning(f"{error}. Falling back to {older.path}")
    return older


def _start(launch: Launch, model: nn.Module, group: dist.ProcessGroup) -> None:
    """Collective over `group`. Start from the weights that `checkpoint.initial_load_path` names, or from new ones."""
    settings = launch.config.checkpoint
    parameters = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    try:
        path = find_initial(launch.config)
        if path is None:
            log.info(f"Starting from new weights, drawn from debug.seed = {launch.config.debug.seed}")
            return
        if settings.initial_load_in_hf:
            load_hf_parameters(
                path, parameters, launch.family.to_hf_name, exclude=settings.exclude_from_loading, process_group=group
            )
        else:
            load_tensors(
                path,
                parameters,
                allow_missing=lambda key: False,
                allow_extra=lambda key: not key.startswith("model."),
                exclude=settings.exclude_from_loading,
                cast=True,
                process_group=group,
            )
    except ValueError as error:  # the weights' fault, raised on every rank
        raise ConfigError([f"checkpoint.initial_load_path = {settings.initial_load_path!r}\n{error}"]) from error
    log.info(f"Starting at step 0 from the weights of {path}, with new optimizer state, schedule and data")
