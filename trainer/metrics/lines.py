"""A file of one JSON object a line that a killed run leaves readable and a resumed run continues in place.

Owns `metrics.jsonl`: appending, cutting back to the step a run resumes from, and keeping an older run's file.
What the objects hold is decided in `writer.py`; here only `step` has a meaning.
"""

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

from trainer.files import write_aside

logger = logging.getLogger(__name__)


class MetricsFile:
    """Lines of steps 1 to `resume_step` that are already in `path`, and those that this run appends.

    A later line belongs to a part of the run that will be done again, so it is removed. With `resume_step` 0 the
    file belongs to another run: it is renamed, never overwritten.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > 0:
            if resume_step == 0:
                _set_aside(path)
            else:
                _cut_after(path, resume_step)
        self._file = path.open("ab")

    def append(self, values: dict[str, Any]) -> None:
        """Add one line; it is with the operating system on return, so a kill tears at most the line being written."""
        try:
            self._file.write(_to_line(values))
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, f"cannot write metrics: {error.strerror}", str(self.path)) from error

    def has(self, step: int, key: str) -> bool:
        """Tell whether a line of `step` has `key`."""
        rows = map(_parse, self.path.read_bytes().splitlines())
        return any(row is not None and row.get("step") == step and key in row for row in rows)

    def close(self) -> None:
        self._file.close()


def _to_line(values: dict[str, Any]) -> bytes:
    """JSON has no NaN or infinity: such a value becomes null and its key is listed under `non_finite`."""
    non_finite = [key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    if non_finite:
        values = {**values, **dict.fromkeys(non_finite), "non_finite": non_finite}
    return json.dumps(values, allow_nan=False).encode() + b"\n"


def _set_aside(path: Path) -> None:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = path.with_name(f"{path.name}.{stamp}")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.{stamp}-{number}")
    path.rename(aside)
    logger.info(f"This run starts at step 0: the metrics of an earlier run are kept in {aside}")


def _cut_after(path: Path, last_step: int) -> None:
    lines = path.read_bytes().splitlines()
    readable = [(line, row) for line in lines if (row := _parse(line)) is not None]
    kept = [line for line, row in readable if row.get("step", 0) <= last_step]
    if len(readable) < len(lines):
        logger.warning(f"{path}: dropped {len(lines) - len(readable)} unreadable line(s), torn when a run was killed")
    with write_aside(path) as file:
        file.writelines(line + b"\n" for line in kept)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # of the JSON, or of the UTF-8 underneath
        return None
    return row if isinstance(row, dict) else None
