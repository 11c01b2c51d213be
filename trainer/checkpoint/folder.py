"""The folder that holds checkpoints: which steps are there, which one to load, which ones to remove.

Owns the names in it and the moves between them, chosen so that a kill at any instant leaves a loadable checkpoint:
`step-N` is sealed; `step-N.partial` is being written; `step-N.replaced` was `step-N` until a newer save of the same
step took its place, and still counts as step N while `step-N` is missing; `step-N.being_removed` is rubbish.
Other names are never touched. Knows nothing of tensors or ranks: call what writes from one rank only.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trainer.checkpoint.manifest import MANIFEST_NAME, find_fault
from trainer.files import flush

logger = logging.getLogger(__name__)

_PARTIAL, _REPLACED, _REMOVED = ".partial", ".replaced", ".being_removed"
_OUR_NAME = re.compile(r"step-(0|[1-9][0-9]*)(\.partial|\.replaced|\.being_removed)?")


class Listing(NamedTuple):
    """The complete steps, ascending, and the (name, reason) of each folder of ours that is not one."""

    complete: list[int]
    skipped: list[tuple[str, str]]


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of `step` lies once it is sealed."""
    return folder / f"step-{step}"


def partial_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of `step` is written before it is sealed."""
    return folder / f"step-{step}{_PARTIAL}"


def list_checkpoints(folder: Path) -> Listing:
    """Return what lies in `folder`; sizes are compared with the manifests, contents are not read."""
    complete: set[int] = set()
    skipped: list[tuple[str, str]] = []
    for name, step, suffix in list_ours(folder):
        if suffix == _PARTIAL:
            skipped.append((name, "the save was not finished"))
        elif suffix != _REMOVED:
            fault = find_fault(folder / name, step)
            if fault is None:
                complete.add(step)
            else:
                skipped.append((name, fault))
    return Listing(sorted(complete), skipped)


def find_checkpoint(folder: Path, load_step: int) -> Path | None:
    """Return the checkpoint to load: that of `load_step`, or with -1 the newest complete one, or None to start afresh.

    Raises ValueError if the step asked for is not there, or if there are only damaged ones: starting afresh over them
    would be a silent loss.
    """
    listing = list_checkpoints(folder)
    there = ", ".join(map(str, listing.complete)) or "none"
    if load_step != -1:
        path = _complete_path(folder, load_step)
        if path is None:
            raise ValueError(
                f"checkpoint.load_step = {load_step}: {folder} has no complete checkpoint of that step; complete: "
                f"{there}{_explain(listing.skipped)}. Set checkpoint.load_step to one of them, or to -1 for the newest"
            )
        return path
    if listing.complete:
        return _complete_path(folder, listing.complete[-1])
    damaged = [(name, reason) for name, reason in listing.skipped if not name.endswith(_PARTIAL)]
    if damaged:
        raise ValueError(
            f"checkpoint.load_step = -1: {folder} has checkpoints, but none is complete{_explain(damaged)}. "
            "To start from new weights, move these folders away or set checkpoint.folder to another one"
        )
    return None


def find_before(folder: Path, path: Path) -> Path | None:
    """Return the newest complete checkpoint older than `path`, or None."""
    match = _OUR_NAME.fullmatch(path.name)
    older = [step for step in list_checkpoints(folder).complete if match and step < int(match[1])]
    return _complete_path(folder, older[-1]) if older else None


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, or something else of its name, out of the way. Its worth is not ours to judge."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{number}")):
        number += 1
    path.rename(aside)
    logger.warning("%s is not complete, or damaged: renamed to %s", path, aside.name)


def resolve_step_folder(path: Path) -> Path:
    """Return `path` if it is a step folder, or the newest complete one in it. ValueError if there is none."""
    if path.name.startswith("step-") or (path / MANIFEST_NAME).exists():
        return path
    found = find_checkpoint(path, -1)
    if found is None:
        raise ValueError(f"{path}: no complete checkpoint there. Give a step-N folder, or the folder that holds them")
    return found


def start_partial(folder: Path, step: int) -> None:
    """Make an empty folder to write the checkpoint of `step` to; what an interrupted save of it left is removed."""
    path = partial_path(folder, step)
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)


def remove_partial(folder: Path, step: int) -> None:
    """Remove what a failed save of `step` wrote, as far as that is possible: the save's own error matters more."""
    shutil.rmtree(partial_path(folder, step), ignore_errors=True)


def publish(folder: Path, step: int) -> Path:
    """Give the sealed partial folder of `step` its final name, replacing an earlier checkpoint of `step`; return it."""
    path, replaced = checkpoint_path(folder, step), folder / f"step-{step}{_REPLACED}"
    if os.path.lexists(path):
        if find_fault(path, step) is None:
            if replaced.exists():
                _discard(replaced)
            path.rename(replaced)
        else:
            set_aside(path)
    partial_path(folder, step).rename(path)
    flush(folder)
    if replaced.exists():
        _discard(replaced)
    return path


def remove_old(folder: Path, keep_latest_k: int, *, keep_every: int = 0, keep: int | None = None) -> None:
    """Remove all but the newest `keep_latest_k` complete checkpoints (0 keeps all), and what earlier removals left.

    Steps that are multiples of `keep_every` stay (0: none for that), and so does the step `keep`: one that was just
    saved goes on from an older one than the newest, perhaps.
    """
    assert keep_latest_k >= 0
    complete = list_checkpoints(folder).complete
    candidates = complete[:-keep_latest_k] if keep_latest_k else []
    superseded = [step for step in candidates if step != keep and not (keep_every and step % keep_every == 0)]
    for name, step, suffix in list_ours(folder):
        if _may_go(folder, step, suffix, superseded):
            try:
                _discard(folder / name)
            except OSError as error:
                logger.warning("old checkpoint %s could not be removed: %s", folder / name, error)


def _may_go(folder: Path, step: int, suffix: str | None, superseded: list[int]) -> bool:
    """Return whether an entry of this name is a complete checkpoint that is superseded, or the rest of one."""
    if suffix is None:
        return step in superseded and find_fault(checkpoint_path(folder, step), step) is None
    if suffix == _REPLACED:
        return step in superseded or find_fault(checkpoint_path(folder, step), step) is None
    return suffix == _REMOVED


def list_ours(folder: Path) -> Iterator[tuple[str, int, str | None]]:
    """Yield (name, step, suffix or None) of every entry whose name is ours, by step."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise ValueError(f"checkpoint.folder: {folder} is not a folder; move that file away or choose another folder")
    matches = [match for match in map(_OUR_NAME.fullmatch, os.listdir(folder)) if match is not None]
    for match in sorted(matches, key=lambda match: (int(match[1]), match[0])):
        yield match[0], int(match[1]), match[2]


def _complete_path(folder: Path, step: int) -> Path | None:
    for candidate in (checkpoint_path(folder, step), folder / f"step-{step}{_REPLACED}"):
        if find_fault(candidate, step) is None:
            return candidate
    return None


def _explain(skipped: list[tuple[str, str]]) -> str:
    return f" (skipped: {'; '.join(f'{name}: {reason}' for name, reason in skipped)})" if skipped else ""


def _discard(path: Path) -> None:
    """Remove a folder of ours. It loses its name first: a half-removed folder must not look like a checkpoint."""
    rubbish = path
    if not path.name.endswith(_REMOVED):
        rubbish = path.with_name(path.name.removesuffix(_REPLACED) + _REMOVED)
        if rubbish.exists():
            shutil.rmtree(rubbish)
        path.rename(rubbish)
        flush(path.parent)
    shutil.rmtree(rubbish)
