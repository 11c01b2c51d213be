"""What lies in a folder of checkpoints, as facts for a reader: steps, sizes, contents, and whether they are whole.

Needs no torch, changes nothing, and trusts nothing that is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint.folder import list_ours
from trainer.checkpoint.manifest import MANIFEST_NAME, find_fault, read_manifest, verify_file
from trainer.checkpoint.state import read_state


@dataclass
class Entry:
    """One folder. `fault` says why it isn't a complete checkpoint; `verified` that every checksum was right."""

    name: str
    fault: str | None = None
    verified: bool = False
    num_bytes: int = 0
    num_files: int = 0
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def experiment(self) -> dict[str, Any]:
        return self.state.get("experiment", {})


@dataclass
class Contents:
    """A folder of checkpoints, or one step folder alone."""

    folder: str
    entries: list[Entry]
    others: list[str]

    def is_whole(self) -> bool:
        """Tell whether nothing is damaged; a save that wasn't finished is none of that."""
        return all(entry.fault is None or entry.name.endswith(".partial") for entry in self.entries)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> Iterator[str]:
        complete = [entry for entry in self.entries if entry.fault is None]
        yield f"{self.folder}: {len(complete)} complete of {len(self.entries)}"
        width = max((len(entry.name) for entry in self.entries), default=0)
        for entry in self.entries:
            yield f"  {entry.name:{width}}  {_describe(entry)}"
        if self.others:
            yield f"  not checkpoints of ours, and never touched: {', '.join(map(_plain, self.others))}"
        if complete:
            newest = complete[-1]
            yield f"Experiment of {newest.name}:"
            yield from (f"  {_plain(key)} = {json.dumps(value)}" for key, value in sorted(newest.experiment.items()))
            for entry in complete[:-1]:
                keys = newest.experiment.keys() | entry.experiment.keys()
                differing = [key for key in sorted(keys) if newest.experiment.get(key) != entry.experiment.get(key)]
                if differing:
                    yield f"{entry.name} differs:"
                    yield from (f"  {_plain(key)} = {json.dumps(entry.experiment.get(key))}" for key in differing)


def inspect_checkpoints(folder: Path, verify: bool = False) -> Contents:
    """Return what lies in `folder`, or what the step folder `folder` is; `verify` reads every byte.

    Raises ValueError if there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder")
    if folder.name.startswith("step-") or (folder / MANIFEST_NAME).exists():
        return Contents(str(folder), [_inspect(folder, None, verify)], [])
    ours = list(list_ours(folder))
    names = {name for name, _, _ in ours}
    entries = [_inspect(folder / name, step, verify) for name, step, _ in ours]
    return Contents(str(folder), entries, sorted(path.name for path in folder.iterdir() if path.name not in names))


def _inspect(path: Path, step: int | None, verify: bool) -> Entry:
    entry = Entry(path.name)
    if path.name.endswith(".partial"):
        entry.fault = "the save was not finished"
        return entry
    entry.fault = find_fault(path, step)
    if entry.fault is not None:
        return entry
    manifest = read_manifest(path)
    entry.num_bytes = sum(seal.num_bytes for seal in manifest.files.values())
    entry.num_files = len(manifest.files)
    try:
        entry.state = read_state(path)
        if verify:
            for name in manifest.files:
                verify_file(path, name, manifest)
            entry.verified = True
    except ValueError as error:
        entry.fault = str(error)
    return entry


def _describe(entry: Entry) -> str:
    if entry.fault is not None:
        return f"not complete: {_plain(entry.fault)}"
    state = entry.state
    parts = [
        "verified" if entry.verified else "complete",
        "weights alone" if state.get("weights_only") else "resumable",
        f"{entry.num_bytes / 1e6:,.1f} MB in {entry.num_files} files",
        f"{state['tokens_seen']:,} tokens seen" if isinstance(state.get("tokens_seen"), int) else "",
        f"written on {_plain(state['mesh'])}" if "mesh" in state else "",
        f"torch {_plain(state['torch'])}" if "torch" in state else "",
        f"before step {state['bad_step']}, which is not finite" if "bad_step" in state else "",
    ]
    return ", ".join(part for part in parts if part)


def _plain(text: Any) -> str:
    """Return text from a stranger without what a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in str(text))
