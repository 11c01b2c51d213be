"""Files that are on the disk wholly or not at all, whatever is killed or switched off, and when."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO


def flush(path: Path) -> None:
    """Flush a file to the disk, or the names in a folder: a flushed file can still lose its name in a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such call
            raise
    finally:
        os.close(descriptor)


def hold(path: Path) -> TextIO:
    """Hold the lock file `path` until it is closed. Raises BlockingIOError if another process does.

    The system closes it when the process ends, however it ends.
    """
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
            file.close()
            raise  # those: some network file systems have no locks
    return file


@contextmanager
def write_aside(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place and name of `path` once all that is written inside is on the disk.

    After an exception, `path` is what it was. Several processes may do so at once: one of them is the last.
    """
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            yield file
        flush(aside)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    flush(path.parent)
