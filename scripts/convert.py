"""Convert weights between our checkpoints and Hugging Face's folders: see docs/checkpoints.md.

`python scripts/convert.py to-hf CHECKPOINT FOLDER` writes safetensors, config.json and the tokenizer; `from-hf FOLDER
CHECKPOINTS` and `from-meta FOLDER CHECKPOINTS` write CHECKPOINTS/step-0, weights alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.door import EXIT_REFUSED, open_door

DTYPES = ("float32", "bfloat16", "float16")
FAMILIES = ("llama3", "llama2")


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{to-hf,from-hf,from-meta}")
    to_hf = commands.add_parser("to-hf", help="a checkpoint to a Hugging Face folder")
    to_hf.add_argument("source", type=Path, metavar="CHECKPOINT", help="a step-N folder, or the folder that holds them")
    to_hf.add_argument("target", type=Path, metavar="FOLDER", help="a new folder")
    to_hf.add_argument("--shard-gb", type=positive, default=5.0, help="size of a file, in 10^9 bytes (default: 5)")
    for name, help in (
        ("from-hf", "a Hugging Face folder"),
        ("from-meta", "Meta's params.json and consolidated.00.pth"),
    ):
        command = commands.add_parser(name, help=f"{help} to a checkpoint")
        command.add_argument("source", type=Path, metavar="FOLDER", help=help)
        command.add_argument("target", type=Path, metavar="CHECKPOINTS", help="folder in which step-0 is made")
        command.add_argument(
            "--family", choices=FAMILIES, default=FAMILIES[0], help="model.name (default: %(default)s)"
        )
    for command in commands.choices.values():
        command.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the result (default: %(default)s)")
    return parser.parse_args(argv)


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return number


def main(argv: list[str]) -> int:
    """Return the exit code: 0, or 2 if nothing was written."""
    arguments = parse_arguments(argv)
    from trainer.checkpoint.folder import checkpoint_path, resolve_step_folder
    from trainer.checkpoint.hf_export import export_hf, import_hf
    from trainer.checkpoint.meta_import import import_meta
    from trainer.dtypes import DTYPES

    source, target, dtype = arguments.source, arguments.target, DTYPES[arguments.dtype]
    try:
        if arguments.command == "to-hf":
            shard_bytes = int(arguments.shard_gb * 1e9)
            export_hf(resolve_step_folder(source), target, dtype=dtype, shard_bytes=shard_bytes, progress=show)
        else:
            if checkpoint_path(target, 0).exists():
                raise ValueError(f"{checkpoint_path(target, 0)} is there already. Move it away, or give another folder")
            convert = import_hf if arguments.command == "from-hf" else import_meta
            target = convert(source, target, name=arguments.family, dtype=dtype, progress=show)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    print(f"Wrote {target}")
    return 0


def show(done: int, total: int) -> None:
    """Draw a bar where somebody looks."""
    if not sys.stderr.isatty():
        return
    filled = 40 * done // total
    end = "\n" if done == total else ""
    print(f"\r[{'#' * filled:40}] {done / 1e9:,.2f} of {total / 1e9:,.2f} GB", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    open_door(main)
