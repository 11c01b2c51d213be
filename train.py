"""Train a Llama from a TOML file: `torchrun train.py --config llama3_8b.toml`, or `python train.py --help`."""

from __future__ import annotations

import os
import sys

from trainer.config_check import check_config
from trainer.config_file import ConfigError, Loaded, load_config
from trainer.config_text import format_config, format_help
from trainer.log import setup_logging

EXIT_CONFIG = 2


def main(argv: list[str]) -> int:
    """Return the exit code: 0 trained or stopped by a signal, 1 failed, 2 refused before anything started."""
    rank = int(os.environ.get("RANK", 0))
    try:
        loaded = load_config(argv)
        if loaded.flags.help:
            print(format_help())
            return 0
        if loaded.flags.print_config:
            print(format_config(loaded))
        world_size = loaded.flags.world_size or int(os.environ.get("WORLD_SIZE", 1))
        problems = check_config(loaded.config, world_size)
        if problems:
            raise ConfigError(problems)
        if loaded.flags.print_config:
            return 0
        setup_logging(rank, color=not loaded.config.metrics.disable_color_printing)
        return dry_run(loaded, world_size) if loaded.flags.dry_run else train(loaded)
    except ConfigError as error:
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            print(error, file=sys.stderr)
        return EXIT_CONFIG


def dry_run(loaded: Loaded, world_size: int) -> int:
    """Print what rank 0 of `world_size` ranks would hold, without other processes and without allocating it."""
    from trainer.describe import describe_dry_run
    from trainer.distributed import fake_process_group

    with fake_process_group(world_size):
        print("\n".join(describe_dry_run(loaded.config, world_size)))
    return 0


def train(loaded: Loaded) -> int:
    from trainer.build import build_run
    from trainer.distributed import find_place, process_group
    from trainer.interrupt import end_at_once_on_signals
    from trainer.launch import plan_launch
    from trainer.loop import Loop

    end_at_once_on_signals()
    place = find_place()
    launch = plan_launch(loaded.config, place)
    with process_group(place, launch.config.comm.init_timeout_seconds):
        run = build_run(launch, place)
        try:
            return 0 if Loop(run).train() else 1
        finally:
            run.metrics.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
