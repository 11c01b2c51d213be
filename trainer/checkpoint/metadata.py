"""Reads the `.metadata` file that torch.distributed.checkpoint (DCP) writes, without trusting it.

The file is a pickle, which can name any function to call while it is read. Owns the list of what DCP writes into it,
and the checks of what comes out: tensors only, whole, in files of this folder. DCP's own reader is not used.
"""

import io
import math
import pickle
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from trainer.checkpoint.manifest import Manifest, read_sealed

METADATA_NAME = ".metadata"

_CLASSES = (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
    metadata.BytesStorageMetadata,  # admitted so that it can be refused by its name
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata.StorageMeta,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    torch.Size,
)


def _layout(name: str) -> torch.layout:
    """Stand in for torch's own function, which a pickle could change."""
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"a tensor of layout {name}")
    return torch.strided


_ADMITTED: dict[tuple[str, str], Any] = {
    **{(admitted.__module__, admitted.__qualname__): admitted for admitted in _CLASSES},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch.serialization", "_get_layout"): _layout,
    ("pathlib", "PosixPath"): PurePosixPath,  # where it was written: a note, never opened
    ("pathlib._local", "PosixPath"): PurePosixPath,  # its name on Python 3.13
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return _ADMITTED[module, name]


def read_metadata(path: Path, manifest: Manifest) -> Metadata:
    """Return the checked metadata of the checkpoint `path`. Raises ValueError if it is hostile, foreign or damaged."""
    content = read_sealed(path, METADATA_NAME, manifest)
    try:
        found = _Unpickler(io.BytesIO(content)).load()
        _check_tensors(found)
        _check_storage(found, manifest)
    except Exception as error:  # bytes from a stranger can fail in any way
        raise ValueError(
            f"{path / METADATA_NAME}: refused, it is hostile or not written by this product: {error}"
        ) from error
    return found


def files_of(found: Metadata, keys: Iterable[str]) -> list[str]:
    """Return the names of the data files that hold any part of the tensors `keys`, sorted."""
    wanted = set(keys)
    return sorted({info.relative_path for index, info in found.storage_data.items() if index.fqn in wanted})


def _check_tensors(found: Any) -> None:
    if not isinstance(found, Metadata):
        raise ValueError(f"it holds a {type(found).__name__}")
    for key, entry in found.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"entry {key!r} is not a tensor; anything else would be an unsafe pickle")
        if not isinstance(entry.properties.dtype, torch.dtype) or not isinstance(entry.size, torch.Size):
            raise ValueError(f"entry {key!r} has no dtype or shape")
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            raise ValueError(f"the parts of {key!r} do not add up to its shape {tuple(entry.size)}")


def _check_storage(found: Metadata, manifest: Manifest) -> None:
    for index, info in found.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, filesystem._StorageInfo):
            raise ValueError("its table of parts holds something else")
        if "/" in info.relative_path or "\\" in info.relative_path or info.relative_path not in manifest.files:
            raise ValueError(f"part of {index.fqn!r} lies in {info.relative_path!r}, not a file of this checkpoint")
        if info.transform_descriptors:
            raise ValueError(f"part of {index.fqn!r} is transformed by {info.transform_descriptors!r}")
