"""Local files as documents: text (one document a file) and jsonl (one document a line), plain or gzipped.

The path is a file, a folder (read with its subfolders, hidden ones left out) or a glob. Order is by path.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path

_JSONL_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
_TEXT_KEY = "text"
_UTF8_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class TextFiles:
    """One document a file; files that are not UTF-8 are skipped and counted."""

    def __init__(self, path: str) -> None:
        self._files = _find_files(path, endings=("",))
        self.skipped: dict[str, int] = {}

    def identity(self) -> str:
        """Return paths, sizes and times of change."""
        return _identity(self._files)

    def __iter__(self) -> Iterator[str]:
        self.skipped = {"not_utf8": 0}
        for file in self._files:
            with _open(file) as stream:
                content = stream.read()
            try:
                text = content.decode()
            except UnicodeDecodeError:
                self.skipped["not_utf8"] += 1
                continue
            yield text


class JsonLines:
    """One document a line: the string under "text" of a JSON object. Blank lines are left out."""

    def __init__(self, path: str) -> None:
        self._files = _find_files(path, endings=_JSONL_ENDINGS)
        self.skipped: dict[str, int] = {}

    def identity(self) -> str:
        """Return paths, sizes and times of change."""
        return _identity(self._files)

    def __iter__(self) -> Iterator[str]:
        self.skipped = {}
        for file in self._files:
            with _open(file) as stream:
                for number, line in enumerate(stream, start=1):
                    if number == 1:
                        line = line.removeprefix(_UTF8_BYTE_ORDER_MARK)
                    if line.strip():
                        yield _read_line(line, f"{file}, line {number}")


def _read_line(line: bytes, place: str) -> str:
    try:
        document = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _line_error(place, f"it is not UTF-8 ({error})") from error
    except json.JSONDecodeError as error:
        raise _line_error(place, f"it is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise _line_error(place, f"it is not a JSON object but {type(document).__name__}")
    if _TEXT_KEY not in document:
        keys = ", ".join(map(repr, document)) or "none"
        raise _line_error(place, f"it has no key {_TEXT_KEY!r}; the keys there are {keys}")
    text = document[_TEXT_KEY]
    if not isinstance(text, str):
        raise _line_error(place, f"its {_TEXT_KEY!r} is not a string but {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _line_error(place, f"its text is not valid Unicode ({error})") from error
    return text


def _line_error(place: str, problem: str) -> ValueError:
    rule = f"each line is one JSON object in UTF-8 with the document's text as a string under {_TEXT_KEY!r}"
    return ValueError(f"training.dataset_path: {place}: {problem}. Rule: {rule}. Way out: repair or remove the line")


def _find_files(path: str, endings: tuple[str, ...]) -> list[Path]:
    root = Path(path).expanduser()
    assert path, "refused with the other settings"
    if root.is_dir():
        found = _walk(root)
        kept = [file for file in found if file.name.endswith(endings)]
        problem = "the folder holds " + (f"none of {', '.join(endings)}" if found else "no files")
    elif root.is_file():
        return [root.absolute()]
    else:
        matches = sorted(glob.glob(os.path.expanduser(path), recursive=True))
        kept = [Path(match).absolute() for match in matches if os.path.isfile(match)]
        problem = "no file, folder or match"
    if kept:
        return kept
    raise ValueError(
        f"training.dataset_path = {path!r}: {problem}. Rule: a file, a folder or a glob with at least one file. "
        "Way out: correct the path, or --training.dataset stdlib, which needs no files"
    )


def _walk(root: Path) -> list[Path]:
    found = []
    for parent, folders, names in os.walk(root.absolute()):
        # Downloads leave their bookkeeping in hidden folders.
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted((file for file in found if file.is_file()), key=Path.as_posix)


def _identity(files: list[Path]) -> str:
    stats = ((file, file.stat()) for file in files)
    return "\n".join(f"{str(file)!r} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats)


@contextmanager
def _open(file: Path) -> Iterator[BufferedIOBase]:
    """Open for reading bytes, unpacking .gz; a file that cannot be read is a ValueError."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"training.dataset_path: {file} cannot be read ({error}). "
            "Rule: every file of the dataset is readable, and every .gz complete. Way out: fetch it again or remove it"
        ) from error
