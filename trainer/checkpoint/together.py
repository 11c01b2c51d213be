"""Doing one thing on all ranks so that a failure on any of them is an error on every one, never a hang.

Owns the exchange of outcomes and of small objects over a host-side group; None stands for one process on its own.
Errors travel as text: an exception that does not pickle would leave the other ranks waiting.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from trainer.checkpoint.manifest import DamagedError

Result = TypeVar("Result")


class _Failure(NamedTuple):
    kind: type[Exception]
    text: str


_KINDS = (DamagedError, ValueError)  # the user's to mend; what else goes wrong is a RuntimeError on every rank


def is_first(process_group: dist.ProcessGroup | None) -> bool:
    """Return whether this is the rank that writes what is common to all."""
    return process_group is None or dist.get_rank(process_group) == 0


def run_together(what: str, action: Callable[[], Result], process_group: dist.ProcessGroup | None) -> Result:
    """Collective over all ranks. Run `action` on this rank and return its result, once all ranks have succeeded.

    If it failed anywhere, every rank raises the failure of the lowest rank that had one: as DamagedError or ValueError
    if it was one, else as RuntimeError.
    """
    result, failure, cause = None, None, None
    try:
        result = action()
    except Exception as error:
        failure, cause = _Failure(_kind_of(error), _describe(error)), error
    failures = gather_everywhere(failure, process_group)
    failed = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    if failed:
        rank, first = failed[0]
        where = f"rank {rank}: " if len(failures) > 1 else ""
        others = f" (and on {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        raise first.kind(f"{what}: {where}{first.text}{others}") from cause
    return result  # type: ignore[return-value]


def gather_everywhere(value: Any, process_group: dist.ProcessGroup | None) -> list[Any]:
    """Collective over all ranks. Return every rank's value, in rank order."""
    if process_group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(values, value, group=process_group)
    return values


def gather_on_first(value: Any, process_group: dist.ProcessGroup | None) -> list[Any] | None:
    """Collective over all ranks. Return every rank's value on the first rank, None on the others."""
    if process_group is None:
        return [value]
    values = [None] * dist.get_world_size(process_group) if is_first(process_group) else None
    dist.gather_object(value, values, group=process_group, group_dst=0)
    return values


def scatter_from_first(values: list[Any] | None, process_group: dist.ProcessGroup | None) -> Any:
    """Collective over all ranks. Return this rank's entry of the list that the first rank holds."""
    if process_group is None:
        assert values is not None
        return values[0]
    received = [None]
    dist.scatter_object_list(received, values, group=process_group, group_src=0)
    return received[0]


def _kind_of(error: Exception) -> type[Exception]:
    return next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)


def _describe(error: BaseException) -> str:
    """Return the error as text. torch.save puts its own message before what the disk said: look behind it."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    if isinstance(error, ValueError):
        return str(error)
    cause = error if behind is None else behind
    return f"{type(cause).__name__}: {cause}"
