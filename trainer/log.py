"""What a run prints, and who prints it: one logger for the whole package, on standard output.

Rank 0 speaks; the other ranks only warn, with their number in front, so the log stays readable at any world size
without help from the launcher. What the lines say is the business of the modules that write them.
"""

import logging
import os
import sys
from typing import TextIO

PACKAGE = "trainer"

_COLORS = {
    "red": "\033[31m",
    "green": "\033[32m",
    "yellow": "\033[33m",
    "blue": "\033[34m",
    "magenta": "\033[35m",
    "cyan": "\033[36m",
    "orange": "\033[38;2;180;60;0m",
    "turquoise": "\033[38;2;54;234;195m",
}
_RESET = "\033[0m"


def setup_logging(rank: int, *, color: bool) -> None:
    """Send the package's log to standard output; calling it again only changes rank and colour."""
    logger = logging.getLogger(PACKAGE)
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    # A handler that some library put on the root logger would print every line a second time.
    logger.propagate = False
    handler = next((handler for handler in logger.handlers if isinstance(handler, _Stdout)), None)
    if handler is None:
        handler = _Stdout()
        logger.addHandler(handler)
    handler.setFormatter(_Prefix(rank, color=color and terminal_takes_color()))


def terminal_takes_color() -> bool:
    """Tell whether standard output is a terminal whose user has not asked for plain text (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, color: str) -> str:
    """Wrap `text` in the terminal codes of `color`."""
    return f"{_COLORS[color]}{text}{_RESET}"


class _Stdout(logging.StreamHandler):
    """Write to whatever `sys.stdout` is at the time, so that redirected output is followed."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


class _Prefix(logging.Formatter):
    def __init__(self, rank: int, *, color: bool) -> None:
        speaker = "[fullgraph]" if rank == 0 else f"[fullgraph] [rank {rank}]"
        super().__init__(f"{speaker} %(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
        self.color = color

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        if not self.color or record.levelno < logging.WARNING:
            return line
        return paint(line, "yellow" if record.levelno < logging.ERROR else "red")
