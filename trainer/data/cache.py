"""Folders that are expensive to make and written once: by one process at a time, and wholly or not at all.

A builder works in a partial folder under an exclusive lock and renames it when everything is on disk; a process that
is killed leaves a lock that the kernel has released and a partial folder that the next builder removes. A manifest
in the folder holds the sizes of its files, so that one that was cut later is noticed and made anew.
"""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.files import flush

MANIFEST_NAME = "manifest.json"

logger = logging.getLogger("trainer.data")


@dataclass(frozen=True)
class CacheEntry:
    """A complete folder and the facts its builder recorded."""

    folder: Path
    facts: dict[str, Any]
    built_now: bool


def build_once(cache_folder: Path, name: str, build: Callable[[Path], dict[str, Any]]) -> CacheEntry:
    """Return the entry `name`; where it is missing or damaged, `build` fills an empty folder and returns facts.

    Waits while another process builds the same entry, and then uses what that one made.
    """
    entry_folder = cache_folder / name
    try:
        # Without the lock first: a complete entry is never written again, and may lie in a read-only folder.
        if (facts := _read_facts(entry_folder)) is not None:
            return CacheEntry(entry_folder, facts, built_now=False)
        cache_folder.mkdir(parents=True, exist_ok=True)
        with _exclusive_lock(cache_folder / f"{name}.lock", name):
            if (facts := _read_facts(entry_folder)) is not None:
                return CacheEntry(entry_folder, facts, built_now=False)
            facts = _build(entry_folder, build)
    except OSError as error:
        raise ValueError(
            f"training.cache_folder = {str(cache_folder)!r}: preparing {name} failed ({error}). "
            "Rule: a folder that can be written, with room for the encoded tokens. "
            "Way out: --training.cache_folder FOLDER"
        ) from error
    return CacheEntry(entry_folder, facts, built_now=True)


def _read_facts(folder: Path) -> dict[str, Any] | None:
    """Return what the manifest of a complete folder says, or None."""
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text())
        damaged = [file for file, size in manifest["sizes"].items() if (folder / file).stat().st_size != size]
        facts = manifest["facts"]
    except FileNotFoundError as error:
        if folder.exists():
            logger.warning("%s is incomplete (%s)", folder, error)
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s is damaged (%s: %s)", folder / MANIFEST_NAME, type(error).__name__, error)
        return None
    if damaged:
        logger.warning("%s is damaged (wrong size: %s)", folder, ", ".join(damaged))
        return None
    return facts


def _build(entry_folder: Path, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    # A fixed name: the lock makes it ours, and what a killed builder left under it goes.
    partial = entry_folder.with_name(f"{entry_folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        facts = build(partial)
        sizes = {file.name: file.stat().st_size for file in partial.iterdir()}
        (partial / MANIFEST_NAME).write_text(json.dumps({"facts": facts, "sizes": sizes}, indent=2))
        for file in partial.iterdir():
            flush(file)
        flush(partial)
        shutil.rmtree(entry_folder, ignore_errors=True)
        partial.rename(entry_folder)
        flush(entry_folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return facts


@contextmanager
def _exclusive_lock(path: Path, name: str) -> Iterator[None]:
    """Hold the lock file; say so once if another process has it."""
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that prepares %s (it holds %s)", name, path)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
