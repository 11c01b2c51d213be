"""Saving a run's checkpoints in step with training or beside it, one at a time, and removing old ones.

Owns the snapshot's way to the disk in a thread, and when it is heard of. The thread talks to no other rank: each rank
reports how far it is (`progress`), the loop agrees on the largest with what it agrees on anyway, and all seal together
(`hear`). So a failure on any rank is raised on every rank, at the next step.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.checkpoint.save import Attach, Plan, Save, Written, begin_save, find_in
from trainer.checkpoint.staging import Staging
from trainer.checkpoint.together import is_first, run_together

logger = logging.getLogger(__name__)

IN_STEP, ASYNC, ASYNC_PINNED = "disabled", "async", "async_with_pinned_mem"


class Progress(IntEnum):
    """How far a rank's part of a save is. The largest of all ranks decides what all do."""

    IDLE = 0
    WRITTEN = 1
    WRITING = 2
    FAILED = 3


@dataclass(frozen=True)
class _InFlight:
    save: Save
    written: Future[Written]
    state: Mapping[str, Any]
    attach: Attach | None


class Saver:
    """Saves to `folder`, with `mode` as in `checkpoint.async_mode`; `retire(step)` then removes what is superseded.

    Every method but `progress` and `hold_updates` is collective over all ranks, and raises RuntimeError on every rank
    if a save failed on any, with the first cause; checkpoints that were sealed before are untouched.
    """

    def __init__(
        self, folder: Path, *, mode: str, retire: Callable[[int], None], process_group: dist.ProcessGroup | None
    ) -> None:
        self._folder, self._mode, self._retire, self._group = folder, mode, retire, process_group
        self._staging = Staging(pinned=mode == ASYNC_PINNED)
        self._plan: Plan | None = None
        self._planned: dict[str, torch.dtype] = {}
        self._in_flight: _InFlight | None = None
        # One thread: files are written, and old ones removed, in the order in which that was asked for.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._retiring: Future[None] | None = None

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        attach: Attach | None,
        in_step: bool = False,
    ) -> None:
        """Save `tensors` as they are now. Asynchronously, unless `in_step`, it returns when they are copied.

        A key has the same shape in each call. Waits for a save that is in flight.
        """
        self.finish()
        wanted = {key: tensor.dtype for key, tensor in tensors.items()}
        plan = self._plan if wanted == self._planned else None
        save = begin_save(self._folder, step, tensors, self._group, plan)
        self._plan, self._planned, find = save.plan, wanted, find_in(tensors)
        if in_step or self._mode == IN_STEP:
            self._seal(save, lambda: save.write(find), state, attach)
            self._remove_old(step)
            return
        run_together("copying it", lambda: self._staging.copy(save.plan.own.items, find), self._group)
        written = self._worker.submit(save.write, self._staging.find, on_host=True)
        self._in_flight = _InFlight(save, written, state, attach)

    def progress(self) -> Progress:
        """Return how far this rank's part is."""
        if self._in_flight is None:
            return Progress.IDLE
        written = self._in_flight.written
        if not written.done():
            return Progress.WRITING
        return Progress.WRITTEN if written.exception() is None else Progress.FAILED

    def hold_updates(self) -> None:
        """Let updates of the tensors that are queued from now on wait until they are copied."""
        self._staging.hold_updates()

    def hear(self, largest: int) -> None:
        """Seal the save in flight if all ranks have written it, or raise if one failed.

        `largest` is the largest `progress` of all ranks.
        """
        if largest in (Progress.WRITTEN, Progress.FAILED):
            step = self._seal_in_flight()
            if is_first(self._group):
                self._retiring = self._worker.submit(self._retire, step)

    def finish(self) -> None:
        """Wait for the save in flight, if there is one, and seal it."""
        if self._in_flight is not None:
            self._remove_old(self._seal_in_flight())
        if self._retiring is not None:
            self._retiring.result()
            self._retiring = None

    def _seal_in_flight(self) -> int:
        assert self._in_flight is not None, "another rank has a save in flight, and this one has not"
        in_flight, self._in_flight = self._in_flight, None
        self._seal(in_flight.save, in_flight.written.result, in_flight.state, in_flight.attach)
        return in_flight.save.step

    def _seal(
        self, save: Save, written: Callable[[], Written], state: Mapping[str, Any], attach: Attach | None
    ) -> None:
        logger.info(f"Saved {save.seal(written, state, attach)}")

    def _remove_old(self, step: int) -> None:
        # The others wait here, under the patient limit of this group, not in a collective of the next step.
        first = is_first(self._group)
        run_together("removing old checkpoints", lambda: self._retire(step) if first else None, self._group)
