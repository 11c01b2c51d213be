"""Print the learning rate a run has at any step: `python scripts/print_schedule.py --config NAME --steps 1,100,1000`.

Takes and refuses the settings that train.py does, those of a checkpoint to resume from included.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.config.arguments import Flags
from trainer.config.load import ConfigError, load_config
from trainer.config.schema import Config
from trainer.door import EXIT_REFUSED, open_door
from trainer.resume import Resume, check_launch, fill_from_checkpoint
from trainer.schedule import build_schedule_of

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
        epilog="Takes --config, --section.key and --world-size as train.py does.",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=read_steps, metavar="N,N,...", help="steps to print, the first being 1")
    arguments, settings_argv = parser.parse_known_args(argv)
    resume = Resume()

    def check(config: Config, flags: Flags) -> list[str]:
        nonlocal resume
        resume, problems = check_launch(config, flags.count_ranks())
        return problems

    try:
        config = load_config(settings_argv, check=check).config
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    schedule = build_schedule_of(fill_from_checkpoint(config, resume))
    total = schedule.total_steps
    for step in arguments.steps or range(1, total + 1, max(1, total // MOST_LINES)):
        print(f"{step:8} {schedule(step - 1):.6e}")
    return 0


if __name__ == "__main__":
    open_door(main)
