"""Time PyTorch's FSDP2 and DDP and our SimpleFSDP side by side, in one run: see docs/benchmark.md.

`python scripts/benchmark.py --case communication` starts two ranks on CPUs, or one on each GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.door import EXIT_FAILED, EXIT_REFUSED, open_door

if TYPE_CHECKING:
    from trainer.benchmark.result import Result
    from trainer.benchmark.saving import SavingResult
    from trainer.config.schema import Config

SAVING = "checkpoint"
CASES = ("communication", "compute", SAVING)
ROUNDS = {SAVING: 3}  # else 20
CPU_RANKS = 2
# What SimpleFSDP has here and some other variant hasn't.
OURS_ALONE = {
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.data_parallel_replicate_degree": 1,
    "activation_checkpoint.mode": "none",
}


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags, and the settings for the config."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        epilog="Further --section.key VALUE arguments are settings, as of train.py.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--case", choices=CASES, default=CASES[0], help="a shipped case (default: %(default)s)")
    which.add_argument("--config", help="the model, precision and batch of another config")
    parser.add_argument("--variants", metavar="A,B", help="some of the variants, by name (default: all)")
    parser.add_argument(
        "--rounds",
        type=int,
        help="how often the variants take turns (default: 20), or saves in each mode (--case checkpoint; default: 3)",
    )
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn (default: %(default)s)")
    parser.add_argument("--ranks", type=int, help="ranks to start here; default: one for each GPU, or 2 on CPUs")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="write a page with bars, which opens from disk")
    arguments, settings = parser.parse_known_args(argv)
    if arguments.rounds is None:
        arguments.rounds = ROUNDS.get(arguments.case, 20)
    return arguments, settings


def main(argv: list[str]) -> int:
    """Return the exit code: 0, 1 if variants computed different losses, 2 if refused before anything started."""
    arguments, settings = parse_arguments(argv)
    from trainer.config.load import ConfigError
    from trainer.ranks import Refused, choose_device, count_ranks, start_ranks

    try:
        device = choose_device(arguments.device)
        ranks = count_ranks(arguments.ranks, device, flag="--ranks", on_cpu=CPU_RANKS)
        variants = choose_variants(arguments)
        config = load(arguments, settings, ranks)
    except (ConfigError, Refused) as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    with tempfile.TemporaryDirectory(prefix="fullgraph-benchmark-") as cache:
        # So that the seconds of a first step are those of compiling, each time.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        return start_ranks(ranks, device, run, arguments, config, variants, device)


def choose_variants(arguments: argparse.Namespace) -> list[str]:
    """Return the names of the variants to run, in the order of the table. Refused if one isn't known."""
    from trainer.benchmark.variants import VARIANTS
    from trainer.ranks import Refused

    if arguments.case == SAVING and not arguments.config and (arguments.variants or arguments.chart):
        raise Refused(f"--case {SAVING} has no variants and no chart. Leave out --variants and --chart")
    wanted = arguments.variants.split(",") if arguments.variants else list(VARIANTS)
    if unknown := [name for name in wanted if name not in VARIANTS]:
        raise Refused(
            f"--variants {arguments.variants}: there is no {', '.join(unknown)}. Known: {', '.join(VARIANTS)}"
        )
    if arguments.rounds < 1 or arguments.steps < 1:
        raise Refused(f"--rounds {arguments.rounds} --steps {arguments.steps}: both must be at least 1")
    return [name for name in VARIANTS if name in wanted]


def load(arguments: argparse.Namespace, settings: list[str], ranks: int) -> Config:
    """Return the config of all variants. ConfigError, or Refused for what only some of them have."""
    from trainer.config.check import check_config
    from trainer.config.load import load_config
    from trainer.config.schema import get
    from trainer.ranks import Refused

    name = arguments.config or f"benchmark_{arguments.case}.toml"
    loaded = load_config(["--config", name, *settings], check=lambda config, _: check_config(config, ranks))
    flags, config = loaded.flags, loaded.config
    if flags.dry_run or flags.print_config or flags.world_size:
        raise Refused("--dry-run, --print-config and --world-size belong to train.py. Leave them out")
    for setting, value in OURS_ALONE.items():
        if get(config, setting) != value:
            raise Refused(f"{setting} = {get(config, setting)!r}: not all variants have that. Add --{setting}={value}")
    return config


def run(arguments: argparse.Namespace, config: Config, variants: list[str], device: str) -> int:
    """Be one rank. All ranks return the same exit code."""
    import torch

    from trainer.benchmark.measure import WAIT_SECONDS, find_hardware, measure, measure_memory
    from trainer.benchmark.result import Result
    from trainer.benchmark.saving import measure_saving
    from trainer.benchmark.variants import AUTO, Setup
    from trainer.distributed import find_place, process_group
    from trainer.parts import build_mesh_of

    place = find_place()
    if device == "cpu":
        place = replace_fields(place, device=torch.device("cpu"))
    is_saving = arguments.case == SAVING and not arguments.config
    with process_group(place, WAIT_SECONDS):
        hardware = find_hardware(place) if AUTO in variants and not is_saving else None
        setup = Setup(config, build_mesh_of(config, place.device, place.world_size), place.device, hardware)
        if is_saving:
            folder = Path(config.job.dump_folder)
            saving = measure_saving(setup, saves=arguments.rounds, folder=folder, config=f"benchmark_{SAVING}")
            if place.rank == 0:
                report(saving, arguments)
            return 0
        measurements = measure(setup, variants, steps=arguments.steps, rounds=arguments.rounds)
    result = Result(
        measurements,
        config=arguments.config or f"benchmark_{arguments.case}",
        tokens_per_step=config.training.local_batch_size * config.training.seq_len * place.world_size,
        precision=config.training.mixed_precision_param,
        ranks=place.world_size,
        device=device,
    )
    if place.rank == 0:
        if device == "cpu":
            peaks = measure_memory(config, variants, place.world_size, hardware)
            for measurement in measurements:
                measurement.peak_bytes = peaks[measurement.variant]
        report(result, arguments)
    return EXIT_FAILED if result.find_wrong() else 0


def report(result: Result | SavingResult, arguments: argparse.Namespace) -> None:
    """Print the table, and write the files that were asked for."""
    from trainer.benchmark.chart import page
    from trainer.benchmark.result import Result

    print("\n".join(result.lines()))
    for line in result.find_wrong() if isinstance(result, Result) else ():
        print(f"WRONG: {line}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result.to_json(), indent=1), encoding="utf-8")
        print(f"Wrote {arguments.json}")
    if arguments.chart and isinstance(result, Result):
        arguments.chart.write_text(page(result), encoding="utf-8")
        print(f"Wrote {arguments.chart}: open it in a browser")


if __name__ == "__main__":
    open_door(main)
