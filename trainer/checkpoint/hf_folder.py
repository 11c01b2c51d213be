"""A folder of safetensors as Hugging Face lays it out: reading parts of its tensors, and writing one shard at a time.

Owns file names and the index. Nothing in such a folder can run code: safetensors are a JSON header and plain bytes.
An index may come from a stranger: names of files that lead out of the folder are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.files import flush

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_UNUSED = ".rotary_emb.inv_freq"  # old exports hold the rotary frequencies, which follow from the config


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Return the folder's `config.json`. Raises ValueError if there is none."""
    return _read_json(folder / CONFIG_NAME)


class HFFolder:
    """The tensors of a folder, by Hugging Face's names. A context: files are mapped, and read where they are used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: ExitStack = ExitStack()
        self._slices: dict[str, Any] = {}

    def __enter__(self) -> HFFolder:
        with ExitStack() as opened:
            for name in _list_files(self.folder):
                try:
                    file = opened.enter_context(safe_open(self.folder / name, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise ValueError(f"{self.folder / name}: not a whole safetensors file: {error}") from error
                keys = file.keys()
                self._slices |= {key: file.get_slice(key) for key in keys if not key.endswith(_UNUSED)}
            self._files = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._slices = {}
        self._files.close()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor."""
        return {name: tuple(part.get_shape()) for name, part in self._slices.items()}

    def read(self, name: str, start: Sequence[int] | None = None, size: Sequence[int] | None = None) -> Tensor:
        """Return a tensor, or its part of `size` that begins at `start`; no other part is read."""
        part = self._slices[name]
        if start is None or size is None:
            return part[:]
        return part[tuple(slice(first, first + count) for first, count in zip(start, size, strict=True))]


def write_hf_tensors(
    folder: Path,
    sizes: Mapping[str, int],
    read: Callable[[list[str]], dict[str, Tensor]],
    *,
    shard_bytes: int,
    mine: Callable[[int], bool] = lambda number: True,
) -> None:
    """Write the tensors `sizes` (bytes by name, in this order) to `folder`, in files of about `shard_bytes`.

    `read(names)` returns those of one file, so that no more is in memory. Only files whose number (from 0) is `mine`
    are written; `write_hf_index` completes the folder.
    """
    for number, (file, names) in enumerate(_divide(sizes, shard_bytes).items()):
        if mine(number):
            tensors = {name: tensor.contiguous() for name, tensor in read(names).items()}
            save_file(tensors, folder / file, metadata={"format": "pt"})
            (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors gives it to the owner alone
            flush(folder / file)


def write_hf_index(folder: Path, sizes: Mapping[str, int], shard_bytes: int) -> None:
    """Write the index, where there are several files."""
    files = _divide(sizes, shard_bytes)
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_json(folder / INDEX_NAME, index)


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a small file and flush it."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    flush(file)


def _divide(sizes: Mapping[str, int], shard_bytes: int) -> dict[str, list[str]]:
    """Return the tensors of each file: as many as fit, and at least one."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {SINGLE_NAME: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": names for i, names in enumerate(shards, 1)}


def _list_files(folder: Path) -> list[str]:
    """Return the safetensors files of the folder. Raises ValueError if there are none, or if the index lies."""
    if (folder / INDEX_NAME).exists():
        weight_map = _read_json(folder / INDEX_NAME).get("weight_map")
        names = sorted(set(weight_map.values())) if isinstance(weight_map, dict) else []
        for name in names:
            if not isinstance(name, str) or os.path.basename(name) != name or not name.endswith(".safetensors"):
                raise ValueError(f"{folder / INDEX_NAME}: {name!r} is not a safetensors file of this folder")
        if names:
            return names
        raise ValueError(f"{folder / INDEX_NAME}: it has no weight_map")
    if (folder / SINGLE_NAME).exists():
        return [SINGLE_NAME]
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    why = f"; {pickles[0]} is a pickle, which could run code: convert it to safetensors first" if pickles else ""
    raise ValueError(f"{folder}: there is no {SINGLE_NAME} and no {INDEX_NAME}{why}")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: not a JSON object")
    return content
