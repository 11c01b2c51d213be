"""The corpus that is always there: the Python sources of the running interpreter's standard library."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_LEFT_OUT_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})


class StandardLibrary:
    """One document a source file, by relative path; files that are not UTF-8 are skipped and counted."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(sysconfig.get_path("stdlib"))
        self._files = _find_sources(self._folder)
        self.skipped: dict[str, int] = {}
        if not self._files:
            raise ValueError(
                f"training.dataset = 'stdlib': this Python has no .py files in {self._folder}. Rule: the embedded "
                "corpus is the standard library's source code. Way out: --training.dataset text with "
                "--training.dataset_path FOLDER, or a Python installed with its sources"
            )

    def identity(self) -> str:
        """Return the SHA-256 of names and contents: a few megabytes, read in a fraction of a second."""
        digest = hashlib.sha256()
        for file in self._files:
            content = file.read_bytes()
            digest.update(f"{file.relative_to(self._folder).as_posix()} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()

    def __iter__(self) -> Iterator[str]:
        self.skipped = {"not_utf8": 0}
        for file in self._files:
            try:
                yield file.read_bytes().decode()
            except UnicodeDecodeError:
                self.skipped["not_utf8"] += 1


def _find_sources(folder: Path) -> list[Path]:
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT_FOLDERS]
        found += [Path(parent, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())
