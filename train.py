"""Train a Llama from a TOML file: `torchrun train.py --config llama3_8b.toml`, or `python train.py --help`."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

from trainer.config.arguments import Flags
from trainer.config.check import check_config
from trainer.config.load import ConfigError, load_config
from trainer.config.schema import Config
from trainer.config.text import format_config, format_help
from trainer.door import EXIT_FAILED, EXIT_REFUSED, open_door
from trainer.files import hold
from trainer.log import setup_logging
from trainer.resume import Resume, check_launch

SECONDS_TO_PRINT = 10
LOCK_NAME = "run.lock"  # below job.dump_folder


def main(argv: list[str]) -> int:
    """Return the exit code: 0 trained or stopped by a signal, 1 failed, 2 refused before anything started."""
    resume = Resume()

    def check(config: Config, flags: Flags) -> list[str]:
        nonlocal resume
        if flags.dry_run:  # of any run, not of a folder's
            return check_config(config, flags.count_ranks())
        resume, problems = check_launch(config, flags.count_ranks())
        return check_flags(flags) + problems

    try:
        loaded = load_config(argv, check=check)
        if loaded.flags.help or loaded.flags.print_config:
            tell(format_help() if loaded.flags.help else format_config(loaded))
            return 0
        color = not loaded.config.metrics.disable_color_printing
        setup_logging(int(os.environ.get("RANK", 0)), color=color)
        if loaded.flags.dry_run:
            return dry_run(loaded.config, loaded.flags.count_ranks())
        return launch(loaded.config, resume)
    except ConfigError as error:
        return refuse(error)


def check_flags(flags: Flags) -> list[str]:
    if not flags.world_size or flags.dry_run or flags.print_config:
        return []
    return [
        f"--world-size {flags.world_size}\nIt is how many ranks --dry-run and --print-config take for given. "
        f"Add one of them, or start as many processes: torchrun --nproc-per-node {flags.world_size} train.py ..."
    ]


def tell(what: str | ConfigError, file: TextIO | None = None) -> None:
    """Print once a machine what every rank has to say."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(what, file=file)


def refuse(error: ConfigError) -> int:
    """Print what is wrong."""
    tell(error, file=sys.stderr)
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:
        _let_first_rank_print()
    return EXIT_REFUSED


def _let_first_rank_print() -> None:
    """Wait for local rank 0 to end: torchrun kills all ranks as soon as one has, and that one prints for all."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_REFUSED))
    time.sleep(SECONDS_TO_PRINT)


def dry_run(config: Config, world_size: int) -> int:
    """Print what rank 0 of `world_size` ranks would hold, without other processes and without allocating it."""
    from trainer.describe import describe_dry_run
    from trainer.distributed import fake_process_group

    with fake_process_group(world_size):
        tell("\n".join(describe_dry_run(config, world_size)))
    return 0


def launch(config: Config, resume: Resume) -> int:
    """Collective over all ranks. Train for one launch."""
    from trainer.build import build_run
    from trainer.distributed import end_failed_rank, find_place, process_group
    from trainer.interrupt import end_at_once_on_signals
    from trainer.launch import plan_launch
    from trainer.loop import Ending, train

    end_at_once_on_signals()
    place = find_place()
    plan = plan_launch(config, place, resume)
    with hold_folder(config) if place.rank == 0 else nullcontext():
        try:
            with process_group(place, config.comm.init_timeout_seconds):
                try:
                    return EXIT_FAILED if train(build_run(plan, place)) is Ending.NOT_FINITE else 0
                except ConfigError as error:  # on every rank alike, so they leave together
                    return refuse(error)
        except Exception as error:
            end_failed_rank(place, error)


def hold_folder(config: Config) -> TextIO:
    """Hold the run's folder: two runs would replace one another's checkpoints. ConfigError if another one does."""
    try:
        return hold(Path(config.job.dump_folder, LOCK_NAME))
    except BlockingIOError as error:
        problem = (
            f"job.dump_folder = {config.job.dump_folder!r}: another run is writing to it. Wait for its end, stop it, "
            "or give another --job.dump_folder"
        )
        raise ConfigError([problem]) from error


if __name__ == "__main__":
    open_door(main)
