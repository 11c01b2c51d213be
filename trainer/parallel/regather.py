"""Gathering again in backward where no compiler does it: eager execution keeps shards instead of gathered weights.

Autograd is given, for each gathered weight that an operation wants to keep, the recipe to gather it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from trainer.parallel.simple_fsdp import watch_gathers


class _Recipe(NamedTuple):
    """How to make a kept tensor again: gather, then look at the memory in the same way."""

    again: Callable[[], Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextlib.contextmanager
def regather_in_backward() -> Iterator[None]:
    """Within, let autograd keep no gathered weight. Backward gathers each again when it needs it, on all data ranks."""
    gathered: dict[int, tuple[StorageWeakRef, Callable[[], Tensor]]] = {}

    def note(whole: Tensor, again: Callable[[], Tensor]) -> None:
        storage = whole.untyped_storage()
        gathered[storage.data_ptr()] = (StorageWeakRef(storage), again)

    def pack(kept: Tensor) -> Any:
        reference, again = gathered.get(kept.untyped_storage().data_ptr(), (None, None))
        # An address may have been freed and given to another tensor since.
        if reference is None or again is None or reference.expired():
            return kept
        return _Recipe(again, kept.shape, kept.stride(), int(kept.storage_offset()))

    def unpack(packed: Any) -> Tensor:
        if not isinstance(packed, _Recipe):
            return packed
        with torch.no_grad():
            whole = packed.again()
        return whole.as_strided(packed.size, packed.stride, packed.offset)

    with watch_gathers(note), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
