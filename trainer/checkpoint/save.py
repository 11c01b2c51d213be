"""Saving a checkpoint: all of it, or an error on every rank and nothing changed.

Owns the order: a fresh partial folder, the tensors by torch.distributed.checkpoint (DCP), the small files, the seal,
the final name. Drives DCP's planner and writer itself instead of calling its `save`, whose own way to report a failure
pickles exceptions and tracebacks and hangs the other ranks where one does not pickle.
What lies in the folder of checkpoints is `folder.py`'s; what the tensors and the state mean is the caller's.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from trainer.checkpoint.folder import partial_path, publish, remove_partial, start_partial
from trainer.checkpoint.manifest import Seal, seal_file, write_manifest
from trainer.checkpoint.state import STATE_NAME
from trainer.checkpoint.together import gather_on_first, is_first, run_together, scatter_from_first
from trainer.files import flush


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    attach: Callable[[Path], None] | None,
    process_group: dist.ProcessGroup | None,
) -> Path:
    """Collective over all ranks. Save a checkpoint of `step` in `folder` and return its path.

    `tensors` may be plain (the same on all ranks that have the key; one of them writes it) or DTensors (each part is
    written once). `state` is JSON, taken from the first rank, which also calls `attach(path)` to add files.
    `process_group` is a host-side group of all ranks; None saves from one process. An earlier checkpoint of the same
    step is replaced. Raises RuntimeError on every rank if any rank failed; earlier checkpoints are then as they were.
    """
    first = is_first(process_group)
    try:
        run_together("making its folder", lambda: start_partial(folder, step) if first else None, process_group)
        path = partial_path(folder, step)
        seals = _write_tensors(path, dict(tensors), process_group)

        def finish() -> None:
            if first:
                _write_small_files(path, state, attach)
                _seal(path, step, seals)
                publish(folder, step)

        run_together("sealing it", finish, process_group)
    except (RuntimeError, ValueError) as error:
        if first:
            remove_partial(folder, step)
        raise RuntimeError(
            f"the checkpoint of step {step} was not saved in {folder}: {error}. Earlier checkpoints are untouched"
        ) from error
    return folder / f"step-{step}"


def _write_tensors(
    path: Path, tensors: dict[str, torch.Tensor], process_group: dist.ProcessGroup | None
) -> dict[str, Seal]:
    """Collective over all ranks. Write the data files and DCP's metadata; return the data's seals on the first rank."""
    # DCP's own flush comes before the file's buffer is written out, so ours in `seal_file` is the one that counts.
    writer = FileSystemWriter(path, sync_files=False)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    plan, metadata = _plan(writer, planner, tensors, process_group)

    def write() -> tuple[list[Any], dict[str, Seal]]:
        results = writer.write_data(planner.finish_plan(plan), planner).wait()
        names = sorted({result.storage_data.relative_path for result in results})
        return results, {name: seal_file(path / name) for name in names}

    written = gather_on_first(run_together("writing its tensors", write, process_group), process_group)

    def finish() -> dict[str, Seal]:
        if written is None or metadata is None:
            return {}
        writer.finish(metadata, [results for results, _ in written])
        return {name: seal for _, seals in written for name, seal in seals.items()}

    return run_together("writing its metadata", finish, process_group)


def _plan(
    writer: FileSystemWriter,
    planner: DefaultSavePlanner,
    tensors: dict[str, torch.Tensor],
    process_group: dist.ProcessGroup | None,
) -> tuple[SavePlan, Metadata | None]:
    """Collective over all ranks. Agree on who writes what; return this rank's part and, on the first, the whole."""
    first = is_first(process_group)

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
    return scatter_from_first(global_plans, process_group), metadata


def _write_small_files(path: Path, state: Mapping[str, Any], attach: Callable[[Path], None] | None) -> None:
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
