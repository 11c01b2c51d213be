"""How a door ends: with its exit code, and quietly where nobody reads its output any more."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

EXIT_FAILED = 1
EXIT_REFUSED = 2


def open_door(main: Callable[[list[str]], int]) -> NoReturn:
    """Call `main` with the command line and end the process with the exit code it returns."""
    # A log line that can't be written must neither stop a run of days nor print a traceback for every step.
    logging.raiseExceptions = False
    tell_of_faults()
    code = 128 + signal.SIGPIPE  # what a shell reports for a program that wrote to a closed pipe
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has left (`| head`). Python flushes once more at exit, and must not fail there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def tell_of_faults() -> None:
    """Let a process that dies of a fault (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL) print where its threads are."""
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
