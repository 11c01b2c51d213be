"""The seal of a checkpoint folder: `manifest.json`, written last, with the size and sha256 of every file.

Owns its format and the checks against it. Does not know what the files mean. A folder without a valid manifest is not a
checkpoint. A manifest may come from a stranger: names that lead out of the folder are refused.
"""

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from trainer.files import flush, write_aside

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
_BLOCK_BYTES = 1 << 22


class DamagedError(ValueError):
    """A file of a checkpoint isn't what was saved: gone, cut short, or changed."""


class Seal(NamedTuple):
    """What a file must be like: its size and the sha256 of its bytes, in hexadecimal."""

    num_bytes: int
    sha256: str


class Manifest(NamedTuple):
    """The step of a checkpoint and its files, by path relative to the folder."""

    step: int
    files: dict[str, Seal]


def seal_file(path: Path) -> Seal:
    """Flush one file to the disk and return its seal."""
    flush(path)
    with path.open("rb") as file:
        return _seal_of(file)


def write_manifest(path: Path, step: int, seals: dict[str, Seal]) -> None:
    """Seal the folder `path`: write its manifest, flush it and the folder, and check it against what lies there."""
    files = {name: {"bytes": seal.num_bytes, "sha256": seal.sha256} for name, seal in sorted(seals.items())}
    with write_aside(path / MANIFEST_NAME) as file:
        file.write(json.dumps({"format_version": FORMAT_VERSION, "step": step, "files": files}, indent=1).encode())
    fault = find_fault(path, step)
    if fault is not None:
        raise RuntimeError(f"{fault}; do all ranks write to one shared file system?")


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the folder `path`. Raises ValueError that says what is wrong with it."""
    file = path / MANIFEST_NAME
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no {MANIFEST_NAME}: the save was not finished, or is not ours") from None
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    try:
        return _parse(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: not a valid manifest ({type(error).__name__}: {error})") from error


def find_fault(path: Path, step: int | None = None) -> str | None:
    """Return why the folder `path` is not a complete checkpoint (of `step`), or None. Contents are not read."""
    if not path.is_dir():
        return f"{path}: not a folder"
    try:
        manifest = read_manifest(path)
    except ValueError as error:
        return str(error)
    if step is not None and manifest.step != step:
        return f"{path}: its manifest says step {manifest.step}"
    for name, seal in manifest.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            return f"{path / name}: {error.strerror}"
        if size != seal.num_bytes:
            return f"{path / name}: {size} bytes, its manifest says {seal.num_bytes}"
    return None


def read_sealed(path: Path, name: str, manifest: Manifest) -> bytes:
    """Return the bytes of a small file of the checkpoint `path` after comparing them with its manifest."""
    if name not in manifest.files:
        raise ValueError(f"{path / name}: not in the checkpoint's manifest; the folder is damaged or not ours")
    try:
        content = (path / name).read_bytes()
    except OSError as error:
        raise DamagedError(f"{path / name}: {error.strerror}") from error
    _compare(path / name, Seal(len(content), hashlib.sha256(content).hexdigest()), manifest.files[name])
    return content


def verify_file(path: Path, name: str, manifest: Manifest) -> None:
    """Raise DamagedError unless the file `name` of the checkpoint `path` is byte for byte what was saved."""
    try:
        with (path / name).open("rb") as file:
            found = _seal_of(file)
    except OSError as error:
        raise DamagedError(f"{path / name}: {error.strerror}") from error
    _compare(path / name, found, manifest.files[name])


def _seal_of(file: Any) -> Seal:
    digest, num_bytes = hashlib.sha256(), 0
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
        num_bytes += len(block)
    return Seal(num_bytes, digest.hexdigest())


def _compare(file: Path, found: Seal, saved: Seal) -> None:
    if found != saved:
        raise DamagedError(
            f"{file}: damaged: {found.num_bytes} bytes with sha256 {found.sha256[:12]}, but its manifest says "
            f"{saved.num_bytes} bytes with {saved.sha256[:12]}; set checkpoint.load_step to another step, "
            f"or remove {file.parent} to fall back to the one before"
        )


def _parse(content: dict[str, Any]) -> Manifest:
    version = content["format_version"]
    if version != FORMAT_VERSION:
        raise ValueError(f"format_version is {version!r}, but {FORMAT_VERSION} is what this version of the code reads")
    seals = {name: Seal(int(seal["bytes"]), str(seal["sha256"])) for name, seal in content["files"].items()}
    for name in seals:
        _check_name(name)
    return Manifest(int(content["step"]), seals)


def _check_name(name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or name == "." or "\\" in name or "\0" in name:
        raise ValueError(f"the name {name!r} does not stay in the folder: the checkpoint is hostile or foreign")
