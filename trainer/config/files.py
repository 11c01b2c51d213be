"""TOML files as written: finding one by path or name, following `extends`, and the line of every key.

Yields what the files say, base first. Whether a setting exists and takes the value is `load.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli

from trainer.config.values import Given, list_words, nearest

EXTENDS = "extends"
_HEADER = re.compile(r"\s*\[\[?([^\[\]]+)\]")
_KEY = re.compile(r"\s*([\w.\"' -]+?)\s*=")


def find_file(name: str, folder: Path, near: Path | None = None) -> Path:
    """Return the file called `name`: a path (relative to `near` or here), or a name in `folder`."""
    here = [(near or Path()) / name]
    for path in here + [folder / name, folder / f"{name}.toml"]:
        if os.path.isfile(path):  # unlike Path.is_file, never an exception
            return path
    if os.path.isdir(here[0]):
        raise ValueError("This is a folder. Name a file in it.")
    names = sorted(path.stem for path in folder.glob("*.toml"))
    ranked = nearest(Path(name).stem, names, limit=3)
    ranked += [other for other in names if other not in ranked]
    there_are = f"There are {list_words(ranked)}" if ranked else "There are no files"
    raise ValueError(f"No such file, and no such name in {show_path(folder)}. {there_are}.")


def read_files(path: Path, folder: Path) -> list[list[Given]]:
    """Read a file and those it extends: one list of settings per file, base first. ValueError with one problem."""
    layers: list[list[Given]] = []
    seen: list[Path] = []
    following: Path | None = path
    while following is not None:
        seen.append(following.resolve())
        table, lines = _read(following)
        extends = table.pop(EXTENDS, None)
        layers.insert(0, [_give(name, value, following, lines) for name, value in _flatten(table)])
        following = None if extends is None else _base(_give(EXTENDS, extends, following, lines), following, folder)
        if following is not None and following.resolve() in seen:
            chain = " extends ".join(show_path(file) for file in [*seen, following])
            raise ValueError(f"{_give(EXTENDS, extends, seen[-1], lines)}\nThe files extend each other: {chain}.")
    return layers


def show_path(path: Path) -> str:
    """Write a path as short as it can be from here."""
    relative = os.path.relpath(path)
    return str(path.resolve()) if relative.startswith("..") else relative


def _base(extends: Given, path: Path, folder: Path) -> Path:
    if not isinstance(extends.value, str):
        raise ValueError(f'{extends}\nIt takes the name of one file. Write extends = "base.toml".')
    try:
        return find_file(extends.value, folder, near=path.parent)
    except ValueError as error:
        raise ValueError(f"{extends}\n{error}") from None


def _read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{show_path(path)}\nThe file is not UTF-8 text. Save it as UTF-8.") from None
    except OSError as error:
        raise ValueError(f"{show_path(path)}\nThe file can't be read: {error.strerror}.") from None
    try:
        return tomli.loads(text), _find_lines(text)
    except (ValueError, RecursionError) as error:  # numbers too long for Python and tables too deep included
        raise ValueError(_syntax_problem(path, text, str(error))) from None


def _syntax_problem(path: Path, text: str, message: str) -> str:
    place = ""
    if where := re.search(r" \(at line (\d+), column (\d+)\)", message):
        place = f":{where[1]}:{where[2]}"
        message = f"{message[: where.start()]} in: {text.splitlines()[int(where[1]) - 1].strip()}"
    hint = "Text stands in quotes, switches are true and false in small letters, a key stands once in its section."
    return f"{show_path(path)}{place}\nThis is not TOML: {message}\n{hint}"


def _find_lines(text: str) -> dict[str, int]:
    """Map dotted names to the line that writes them. A guess by the look of a line: the parser does not tell."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            section = _plain(header[1]) + "."
            lines.setdefault(section[:-1], number)
        elif key := _KEY.match(line):
            lines.setdefault(section + _plain(key[1]), number)
    return lines


def _plain(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))


def _give(name: str, value: Any, path: Path, lines: dict[str, int]) -> Given:
    # A key of an inline table stands on the line of the table.
    written = name
    while written not in lines and "." in written:
        written = written.rpartition(".")[0]
    line = f":{lines[written]}" if written in lines else ""
    return Given(name, value, show_path(path) + line)


def _flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
