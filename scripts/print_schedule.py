"""Print the learning rate of any step: `python scripts/print_schedule.py --config NAME --steps 1,100,1000`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.config_file import ConfigError, load_config
from trainer.schedule import build_schedule


def main(argv: list[str]) -> int:
    """Print `step lr` for each step asked for, all of a short schedule by default. Takes train.py's settings too."""
    wanted: list[int] = []
    if "--steps" in argv:
        at = argv.index("--steps")
        wanted = [int(number) for number in argv[at + 1].split(",")]
        argv = argv[:at] + argv[at + 2 :]
    try:
        config = load_config(argv).config
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
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
    for step in wanted or range(1, total + 1, max(1, total // 50)):
        print(f"{step:8} {schedule(step - 1):.6e}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
