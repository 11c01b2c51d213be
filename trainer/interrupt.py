"""SIGTERM and SIGINT: a request that all ranks act on at the same step.

Until `install` the signals end the process at once, since there is nothing to save. After it they only set a flag, and
ranks agree through a host-side group; a second signal of the same kind ends the process at once after all.
"""

from __future__ import annotations

import logging
import signal
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = logging.getLogger(__name__)


def end_at_once_on_signals() -> None:
    """Let SIGTERM and SIGINT end this process immediately, even inside the compiler."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


class Interrupt:
    """A stop requested on any rank. `ask` and `agreed` are called in pairs by every rank, at the same places.

    `largest` holds what ranks agreed on besides: of each number they gave to `ask`, the largest.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._received: int | None = None
        self.largest: list[int] = []
        self._numbers = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def install(self) -> None:
        """From now on a signal asks for a stop instead of ending the process."""
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        self._received = number

    def ask(self, *besides: int) -> None:
        """Collective over the host group. Start to ask all ranks whether one was told to stop; doesn't wait.

        Every rank gives as many numbers `besides`, of which they agree on the largest.
        """
        self._numbers = torch.tensor([self._received or 0, *besides], dtype=torch.int32)
        self._work = dist.all_reduce(self._numbers, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def agreed(self) -> bool:
        """Collective over the host group. Wait for the answer to the last `ask`: True on every rank or on none."""
        assert self._work is not None, "agreed() follows ask()"
        self._work.wait()
        self._work = None
        stop, *self.largest = self._numbers.tolist()
        return bool(stop)

    def requested(self) -> bool:
        """Collective over the host group. Ask and wait."""
        self.ask()
        return self.agreed()
