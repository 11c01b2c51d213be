"""Saving a checkpoint: all of it, or an error on every rank and nothing changed.

Owns the order: a fresh partial folder, the tensors by torch.distributed.checkpoint (DCP), the small files, the seal,
the final name. Drives DCP's planner and writer itself instead of calling its `save`, whose own way to report a failure
pickles exceptions and tracebacks and hangs the other ranks where one does not pickle.
What lies in the folder of checkpoints is `folder.py`'s; what the tensors and the state mean is the caller's.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.utils import find_state_dict_object

from trainer.checkpoint.folder import partial_path, publish, remove_partial, start_partial
from trainer.checkpoint.manifest import Seal, seal_file, write_manifest
from trainer.checkpoint.state import STATE_NAME
from trainer.checkpoint.together import gather_on_first, is_first, run_together, scatter_from_first
from trainer.files import flush

Find = Callable[[WriteItem], torch.Tensor]
Attach = Callable[[Path], None]


class Plan(NamedTuple):
    """Who writes what: this rank's part and, on the first rank, the whole. Holds for all saves of the same tensors."""

    own: SavePlan
    metadata: Metadata | None


class Written(NamedTuple):
    """What a rank wrote: DCP's results, and the seals of its files."""

    results: list[Any]
    seals: dict[str, Seal]


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    attach: Attach | None,
    process_group: dist.ProcessGroup | None,
) -> Path:
    """Collective over all ranks. Save a checkpoint of `step` in `folder` and return its path.

    `tensors` may be plain (the same on all ranks that have the key; one of them writes it) or DTensors (each part is
    written once). `state` is JSON, taken from the first rank, which also calls `attach(path)` to add files.
    `process_group` is a host-side group of all ranks; None saves from one process. An earlier checkpoint of the same
    step is replaced. Raises RuntimeError on every rank if any rank failed; earlier checkpoints are then as they were.
    """
    save = begin_save(folder, step, tensors, process_group)
    return save.seal(lambda: save.write(find_in(tensors)), state, attach)


def find_in(tensors: Mapping[str, torch.Tensor]) -> Find:
    """Return what finds this rank's part of a tensor, sharing its memory."""
    known = dict(tensors)
    return lambda item: find_state_dict_object(known, item.index)


def begin_save(
    folder: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    process_group: dist.ProcessGroup | None,
    plan: Plan | None = None,
) -> "Save":
    """Collective over all ranks. Make the partial folder of `step`, and agree on who writes what.

    `plan` is that of an earlier save of tensors with the same keys and shapes on the same ranks. Nothing is read from
    `tensors` yet. Raises as `save_checkpoint`.
    """
    with _told(folder, step, process_group):
        first = is_first(process_group)
        run_together("making its folder", lambda: start_partial(folder, step) if first else None, process_group)
        return Save(
            folder, step, plan or _plan(partial_path(folder, step), dict(tensors), process_group), process_group
        )


@dataclass(frozen=True)
class Save:
    """A save that has begun. Its parts are called in order: `write`, which is this rank's alone, and `seal`."""

    folder: Path
    step: int
    plan: Plan
    process_group: dist.ProcessGroup | None

    def write(self, find: Find, *, on_host: bool = False) -> Written:
        """Write this rank's files and flush them to the disk. No communication: any thread may do it.

        `on_host` says that `find` returns host tensors, for which no thread needs to know a device.
        """
        path = partial_path(self.folder, self.step)
        # DCP's own flush comes before the file's buffer is written out, so ours in `seal_file` is the one that counts.
        writer = FileSystemWriter(path, sync_files=False)
        if on_host:
            writer.per_thread_copy_ahead = 0
        results = writer.write_data(self.plan.own, _Source(find)).wait()
        names = sorted({result.storage_data.relative_path for result in results})
        return Written(results, {name: seal_file(path / name) for name in names})

    def seal(self, written: Callable[[], Written], state: Mapping[str, Any], attach: Attach | None) -> Path:
        """Collective over all ranks. Complete what `written()` returns on each rank, and publish; return the path.

        Raises as `save_checkpoint`, also if `written` fails on any rank.
        """
        path, group = partial_path(self.folder, self.step), self.process_group
        with _told(self.folder, self.step, group):
            parts = gather_on_first(run_together("writing its tensors", written, group), group)

            def finish() -> None:
                if parts is not None and self.plan.metadata is not None:
                    FileSystemWriter(path, sync_files=False).finish(
                        self.plan.metadata, [part.results for part in parts]
                    )
                    _write_small_files(path, state, attach)
                    _seal(path, self.step, {name: seal for part in parts for name, seal in part.seals.items()})
                    publish(self.folder, self.step)

            run_together("sealing it", finish, group)
        return self.folder / f"step-{self.step}"


class _Source(DefaultSavePlanner):
    """Hands DCP's writer the tensors of a plan that was made before."""

    def __init__(self, find: Find) -> None:
        super().__init__()
        self._find = find

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._find(write_item)


@contextmanager
def _told(folder: Path, step: int, process_group: dist.ProcessGroup | None) -> Iterator[None]:
    """Turn a failure inside, which is one of all ranks, into what the user reads; what was written is removed."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if is_first(process_group):
            remove_partial(folder, step)
        raise RuntimeError(
            f"the checkpoint of step {step} was not saved in {folder}: {error}. Earlier checkpoints are untouched"
        ) from error


def _plan(path: Path, tensors: dict[str, torch.Tensor], process_group: dist.ProcessGroup | None) -> Plan:
    """Collective over all ranks. Agree on who writes what."""
    first = is_first(process_group)
    writer = FileSystemWriter(path, sync_files=False)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def plan_own() -> SavePlan:
        planner.set_up_planner(tensors, writer.storage_meta(), first)
        writer.set_up_storage_writer(first)
        return writer.prepare_local_plan(planner.create_local_plan())

    plans = gather_on_first(run_together("planning it", plan_own, process_group), process_group)

    def plan_all() -> tuple[list[SavePlan] | None, Metadata | None]:
        if plans is None:
            return None, None
        global_plans, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(global_plans), metadata

    global_plans, metadata = run_together("planning it", plan_all, process_group)
    own = scatter_from_first(global_plans, process_group)
    return Plan(planner.finish_plan(own), metadata)


def _write_small_files(path: Path, state: Mapping[str, Any], attach: Attach | None) -> None:
    (path / STATE_NAME).write_text(json.dumps(state, indent=1), encoding="utf-8")
    if attach is not None:
        attach(path)


def _seal(path: Path, step: int, seals: dict[str, Seal]) -> None:
    """Seal the data files by the seals of the ranks that wrote them, and all other files and folders here."""
    seals = dict(seals)
    for where, _, names in os.walk(path):
        for name in names:
            file = Path(where) / name
            relative = file.relative_to(path).as_posix()
            if relative not in seals:
                seals[relative] = seal_file(file)
        flush(Path(where))
    write_manifest(path, step, seals)
