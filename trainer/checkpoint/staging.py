"""Host memory that a save is copied to, so that training may go on while it is written.

Owns the buffers, which later saves use again, and when a copy is done. What to copy is a save's plan.
"""

from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from trainer.checkpoint.save import Find


class Staging:
    """A snapshot of this rank's parts. With `pinned` memory, copies from a GPU go on while it computes."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._sources: list[torch.Tensor] = []  # alive until they are copied

    def copy(self, items: Sequence[WriteItem], find: Find) -> None:
        """Copy the parts `items`. From a GPU with pinned memory this only begins; see `hold_updates`."""
        self._sources = [find(item).detach() for item in items]
        if self._pinned:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # None: nothing changes
            for item, source in zip(items, self._sources, strict=True):
                self._buffer_for(item.index, source).copy_(source, non_blocking=self._pinned)
        if self._stream is None:
            self._sources = []
        else:
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)

    def hold_updates(self) -> None:
        """Let what is queued on the device from now on wait for the copies. The host doesn't."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._sources = []
            self._copied = None

    def find(self, item: WriteItem) -> torch.Tensor:
        """Return the copy of a part, once it is there."""
        if self._stream is not None:
            self._stream.synchronize()
        return self._buffers[item.index]

    def _buffer_for(self, index: MetadataIndex, source: torch.Tensor) -> torch.Tensor:
        if index not in self._buffers:
            self._buffers[index] = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._pinned)
        return self._buffers[index]
