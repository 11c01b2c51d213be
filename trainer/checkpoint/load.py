"""Loading a checkpoint into tensors that exist, on any number of ranks, whatever the number it was written on.

Owns the comparison of what is saved with what is wanted, before anything is read, and the check of every byte that is
used. Reads with the planner and reader of torch.distributed.checkpoint (DCP) but with our own reading of its metadata:
nothing in the folder can run code. Which checkpoint to load is `folder.py`'s question.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from trainer.checkpoint.manifest import Manifest, read_manifest, verify_file
from trainer.checkpoint.metadata import files_of, read_metadata
from trainer.checkpoint.together import gather_everywhere, is_first, run_together

_MAX_NAMED = 20


class _Differences(NamedTuple):
    """How this rank's tensors differ from what is saved."""

    missing: set[str]
    extra: set[str]
    unlike: dict[str, str]
    saved: set[str]


def matches(key: str, patterns: Iterable[str]) -> bool:
    """Tell whether a pattern is that of `key` or of a part before a dot: "optimizer" stands for "optimizer.*"."""
    return any(fnmatchcase(key, pattern) or fnmatchcase(key, f"{pattern}.*") for pattern in patterns)


def load_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    allow_missing: Callable[[str], bool],
    allow_extra: Callable[[str], bool],
    exclude: Sequence[str] = (),
    cast: bool = False,
    process_group: dist.ProcessGroup | None,
) -> None:
    """Collective over all ranks. Fill `tensors` (plain or DTensors, with memory) in place from the checkpoint `path`.

    A key that is not saved is an error unless `allow_missing(key)`, and then its tensor stays as it is; a saved key
    that no rank asks for is one unless `allow_extra(key)`. Keys of the patterns `exclude` are neither compared nor
    read; a pattern that matches no key of either side is an error. Shapes must be equal, and dtypes unless the values
    may be `cast`. All of this is compared, and raises ValueError on every rank, before any tensor is touched; so does
    DamagedError where a file isn't what was saved. `process_group` is a host-side group of all ranks; None loads on one
    process, without torch.distributed.
    """
    asked = tensors
    tensors = {key: tensor for key, tensor in asked.items() if not matches(key, exclude)}
    manifest, metadata = run_together(f"loading {path}", lambda: _read_headers(path), process_group)
    differences = run_together(
        f"loading {path}",
        lambda: _compare(
            metadata, tensors, allow_missing, lambda key: allow_extra(key) or matches(key, exclude), cast=cast
        ),
        process_group,
    )
    _check_same(path, differences, process_group)
    check_patterns(path, exclude, asked.keys() | differences.saved, process_group)
    wanted = {key: tensor for key, tensor in tensors.items() if key in metadata.state_dict_metadata}
    _verify_files(path, manifest, files_of(metadata, wanted), process_group)
    run_together(f"loading {path}", lambda: _read(path, metadata, wanted, is_first(process_group)), process_group)


class OpenCheckpoint:
    """Plain tensors of a verified checkpoint, read some at a time, on this rank alone."""

    def __init__(self, path: Path, metadata: Metadata, keys: list[str]) -> None:
        self._path, self._metadata = path, metadata
        entries: dict[str, Any] = metadata.state_dict_metadata
        self.shapes: dict[str, torch.Size] = {key: entries[key].size for key in keys}

    def read(self, keys: list[str]) -> dict[str, torch.Tensor]:
        """Return the tensors `keys`, in the dtypes they were saved in."""
        entries: dict[str, Any] = self._metadata.state_dict_metadata
        tensors = {key: torch.empty(self.shapes[key], dtype=entries[key].properties.dtype) for key in keys}
        _read(self._path, self._metadata, tensors, first=True)
        return tensors


def open_checkpoint(
    path: Path, wanted: Callable[[str], bool], process_group: dist.ProcessGroup | None
) -> OpenCheckpoint:
    """Collective over all ranks. Verify what holds the tensors whose key is `wanted`. Raises ValueError if damaged."""
    manifest, metadata = run_together(f"loading {path}", lambda: _read_headers(path), process_group)
    keys = [key for key in metadata.state_dict_metadata if wanted(key)]
    _verify_files(path, manifest, files_of(metadata, keys), process_group)
    return OpenCheckpoint(path, metadata, keys)


def _read_headers(path: Path) -> tuple[Manifest, Metadata]:
    manifest = read_manifest(path)
    return manifest, read_metadata(path, manifest)


def _compare(
    metadata: Metadata,
    tensors: Mapping[str, torch.Tensor],
    allow_missing: Callable[[str], bool],
    allow_extra: Callable[[str], bool],
    *,
    cast: bool,
) -> _Differences:
    saved: dict[str, Any] = metadata.state_dict_metadata
    unlike = {}
    for key in tensors.keys() & saved.keys():
        tensor, entry = tensors[key], saved[key]
        assert not tensor.is_meta, f"{key} has no memory to load into"
        if tensor.shape != entry.size or (tensor.dtype != entry.properties.dtype and not cast):
            unlike[key] = (
                f"{key} is {entry.properties.dtype} {tuple(entry.size)} in the checkpoint "
                f"and {tensor.dtype} {tuple(tensor.shape)} here"
            )
    return _Differences(
        missing={key for key in tensors.keys() - saved.keys() if not allow_missing(key)},
        extra={key for key in saved.keys() - tensors.keys() if not allow_extra(key)},
        unlike=unlike,
        saved=set(saved),
    )


def _check_same(path: Path, differences: _Differences, process_group: dist.ProcessGroup | None) -> None:
    """Collective over all ranks. Raise ValueError that lists all differences, if there are any."""
    per_rank: list[_Differences] = gather_everywhere(differences, process_group)
    missing = set().union(*(rank.missing for rank in per_rank))
    extra = set.intersection(*(rank.extra for rank in per_rank))  # what one rank does not ask for, another one may
    unlike = {key: text for rank in per_rank for key, text in rank.unlike.items()}
    problems = []
    if missing:
        problems.append(f"not in the checkpoint: {_name_some(missing)}")
    if extra:
        problems.append(f"only in the checkpoint: {_name_some(extra)}")
    if unlike:
        problems.append(_name_some(set(unlike.values())))
    if problems:
        raise ValueError(
            f"{path} does not fit this run: {'; '.join(problems)}. Use the model and optimizer it was written with, "
            "or another checkpoint"
        )


def check_patterns(
    path: Path, patterns: Sequence[str], keys: set[str], process_group: dist.ProcessGroup | None
) -> None:
    """Collective over all ranks. Raise ValueError if a pattern matches no key on any rank: it is a misspelt one."""
    if not patterns:  # as on every rank
        return
    idle = [pattern for pattern in patterns if not any(matches(key, [pattern]) for key in keys)]
    if idle_everywhere := sorted(set.intersection(*map(set, gather_everywhere(idle, process_group)))):
        parts = sorted({".".join(re.sub(r"\.\d+\.", ".*.", key).split(".")[:3]) for key in keys})
        raise ValueError(
            f"checkpoint.exclude_from_loading = {list(patterns)}: each pattern matches a key of {path} or of this run, "
            f"and {', '.join(idle_everywhere)} doesn't. Leave it out, or use patterns of {_name_some(set(parts))}"
        )


def _name_some(names: set[str]) -> str:
    shown = sorted(names)[:_MAX_NAMED]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _verify_files(path: Path, manifest: Manifest, names: list[str], process_group: dist.ProcessGroup | None) -> None:
    """Collective over all ranks. Compare the files with their checksums, each rank a share of what all need."""
    everything = sorted(set().union(*gather_everywhere(names, process_group)))
    rank = 0 if process_group is None else dist.get_rank(process_group)
    world_size = 1 if process_group is None else dist.get_world_size(process_group)

    def verify_share() -> None:
        for name in everything[rank::world_size]:
            verify_file(path, name, manifest)

    run_together(f"loading {path}", verify_share, process_group)


def _read(path: Path, metadata: Metadata, tensors: dict[str, torch.Tensor], first: bool) -> None:
    """Read this rank's parts. DCP needs no exchange for that: every rank sees the metadata of all parts."""
    reader = FileSystemReader(path)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with torch.no_grad():
        planner.set_up_planner(dict(tensors), metadata, first)
        reader.set_up_storage_reader(metadata, first)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()
