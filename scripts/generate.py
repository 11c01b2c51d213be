"""Continue a text with a checkpoint, on one process: `python scripts/generate.py --checkpoint DIR --prompt TEXT`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Continue a text with a checkpoint.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a step-N folder, or the folder that holds them")
    parser.add_argument("--prompt", default="def ", help="text to continue")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens to generate")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="divides the logits; 0 takes the likeliest token"
    )
    parser.add_argument("--top-k", type=int, default=50, help="only the k likeliest tokens are drawn; 0 draws from all")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same text")
    return parser.parse_args(argv)


def find_step_folder(path: Path) -> Path:
    """Return `path`, or the newest complete checkpoint in it. ValueError if there is none."""
    from trainer.checkpoint.folder import find_checkpoint

    if path.name.startswith("step-"):
        return path
    found = find_checkpoint(path, load_step=-1)
    if found is None:
        raise ValueError(
            f"--checkpoint {path}: no complete checkpoint there. Give a step-N folder or the one above it."
        )
    return found


def main(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    import torch

    from trainer.checkpoint.plain import load_plain_model
    from trainer.generate import generate

    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model, tokenizer = load_plain_model(find_step_folder(arguments.checkpoint), device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    ids = generate(
        model,
        [tokenizer.bos_id, *tokenizer.encode(arguments.prompt)],
        tokens=arguments.tokens,
        vocab_size=tokenizer.vocab_size,
        stop_id=tokenizer.eos_id,
        device=device,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    print(tokenizer.decode(ids[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
