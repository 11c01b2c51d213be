"""What a checkpoint says besides its tensors, as JSON. Needs no torch, so that settings can be checked against it."""

import json
from pathlib import Path
from typing import Any

from trainer.checkpoint.manifest import read_manifest, read_sealed

STATE_NAME = "state.json"


def read_state(path: Path) -> dict[str, Any]:
    """Return the state of the checkpoint `path`. Raises ValueError if it is damaged."""
    return json.loads(read_sealed(path, STATE_NAME, read_manifest(path)))
