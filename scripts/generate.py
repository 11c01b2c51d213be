"""Continue a text with a checkpoint, on one process: `python scripts/generate.py --checkpoint DIR --prompt TEXT`."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.door import EXIT_REFUSED, open_door


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Continue a text with a checkpoint.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a step-N folder, or the folder that holds them")
    parser.add_argument("--prompt", default="def ", help="text to continue")
    parser.add_argument("--tokens", type=number_from_zero(int), default=64, help="most tokens to generate")
    parser.add_argument(
        "--temperature", type=number_from_zero(float), default=0.8, help="divides the logits; 0 takes the likeliest"
    )
    parser.add_argument(
        "--top-k",
        type=number_from_zero(int),
        default=50,
        help="only the k likeliest tokens are drawn; 0 draws from all",
    )
    parser.add_argument("--seed", type=number_from_zero(int), default=0, help="the same seed draws the same text")
    return parser.parse_args(argv)


def number_from_zero(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return a reader of numbers that are zero or more."""

    def read(text: str) -> float:
        number = kind(text)
        if not 0 <= number < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not zero or more")
        return number

    read.__name__ = kind.__name__  # argparse names it when the text is no number at all
    return read


def find_step_folder(path: Path) -> Path:
    """Return `path`, or the newest complete checkpoint in it. ValueError if there is none."""
    from trainer.checkpoint.folder import list_checkpoints, resolve_step_folder

    found = resolve_step_folder(path)
    for name, reason in list_checkpoints(path).skipped if found != path else ():
        print(f"{name} is skipped: {reason}", file=sys.stderr)
    return found


def main(argv: list[str]) -> int:
    """Print the prompt and its continuation."""
    arguments = parse_arguments(argv)
    from trainer.checkpoint.plain import load_plain_model
    from trainer.distributed import find_place
    from trainer.generate import before_stop, build_next_logits, generate

    device = find_place().device
    try:
        model, tokenizer = load_plain_model(find_step_folder(arguments.checkpoint), device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    prompt = tokenizer.encode(arguments.prompt)
    drawn = generate(
        build_next_logits(model, device),
        [tokenizer.bos_id, *prompt],
        vocab_size=tokenizer.vocab_size,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    ids = before_stop(itertools.islice(drawn, arguments.tokens), tokenizer.eos_id)
    print(tokenizer.decode([*prompt, *ids]))
    return 0


if __name__ == "__main__":
    open_door(main)
