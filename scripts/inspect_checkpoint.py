"""Show what checkpoints a folder holds: `python scripts/inspect_checkpoint.py DIR [--verify] [--json]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.checkpoint.inspect import inspect_checkpoints
from trainer.door import EXIT_FAILED, EXIT_REFUSED, open_door


def main(argv: list[str]) -> int:
    """Return the exit code: 0, 1 if a checkpoint is damaged, 2 if there is no such folder."""
    parser = argparse.ArgumentParser(description="Show what checkpoints a folder holds.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder of checkpoints, or one step-N folder")
    parser.add_argument("--verify", action="store_true", help="compare every byte with its checksum")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    try:
        contents = inspect_checkpoints(arguments.folder, arguments.verify)
    except ValueError as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    print(json.dumps(contents.to_json(), indent=1) if arguments.json else "\n".join(contents.lines()))
    return 0 if contents.is_whole() else EXIT_FAILED


if __name__ == "__main__":
    open_door(main)
