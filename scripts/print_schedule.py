"""Print the learning rate of any step: `python scripts/print_schedule.py --config NAME --steps 1,100,1000`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.config.load import ConfigError, load_config
from trainer.door import EXIT_REFUSED, open_door
from trainer.schedule import build_schedule

MOST_LINES = 50


def read_steps(text: str) -> list[int]:
    steps = [int(number) for number in text.split(",")]
    if min(steps) < 1:
        raise argparse.ArgumentTypeError(f"{text}: the first step is 1")
    return steps


def main(argv: list[str]) -> int:
    """Print `step lr` for each step asked for, or for a choice of all. Takes train.py's settings too."""
    parser = argparse.ArgumentParser(
        description="Print the learning rate of any step.",
        epilog="Takes --config and --section.key as train.py does.",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=read_steps, metavar="N,N,...", help="steps to print, the first being 1")
    arguments, settings_argv = parser.parse_known_args(argv)
    try:
        config = load_config(settings_argv).config
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    settings = config.lr_scheduler
    total = settings.total_steps or config.training.steps
    schedule = build_schedule(
        peak=config.optimizer.lr,
        warmup_steps=settings.warmup_steps,
        total_steps=total,
        decay_ratio=settings.decay_ratio,
        decay_type=settings.decay_type,
        min_lr_factor=settings.min_lr_factor,
    )
    for step in arguments.steps or range(1, total + 1, max(1, total // MOST_LINES)):
        print(f"{step:8} {schedule(step - 1):.6e}")
    return 0


if __name__ == "__main__":
    open_door(main)
