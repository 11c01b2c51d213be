"""Show what the graph passes do to a config at any world size, with no GPU and no other process.

`python scripts/inspect_graph.py --config llama3_8b.toml --world-size 64 --hardware H100`; see docs/inspect_graph.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.config.check import accumulation_steps, check_config
from trainer.config.check_float8 import SECTION
from trainer.config.load import ConfigError, load_config
from trainer.config.schema import Config, Float8, replace
from trainer.door import EXIT_REFUSED, open_door

PUBLISHED = Path(__file__).resolve().parents[1] / "docs" / "published_runs.toml"
# What of the table can be traced: compiled, without context, pipeline and asynchronous tensor parallelism.
TRACED_ROWS = ("T1b", "T3b", "T4a")
RECOMPUTE = {"selective_op": ("selective", "op"), "full": ("full", "2")}
GIB = 1024**3


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description="Show what the graph passes do, simulated on described hardware.",
        epilog="Takes --config, --world-size and --section.key as train.py does.",
        allow_abbrev=False,
    )
    parser.add_argument("--hardware", default="H100", help="what the ranks are: H100, H200, A100, B200 or CPU")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the timelines for https://ui.perfetto.dev")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the timelines as a page that opens from disk")
    parser.add_argument("--published", action="store_true", help="hold the model against published runs instead")
    return parser.parse_known_args(argv)


def main(argv: list[str]) -> int:
    """Print the forecasts of a config under every plan, or of the published runs."""
    arguments, settings_argv = parse_arguments(argv)
    from trainer.parallel.overlap.hardware import find_hardware  # imports torch, which --help needs not wait for

    try:
        if arguments.published:
            print_published(arguments.hardware)
            return 0
        loaded = load_config(settings_argv)
        world_size = loaded.flags.world_size or 1
        problems = check_config(loaded.config, world_size)
        if loaded.config.parallelism.fsdp_gather_once:
            problems.append(
                "parallelism.fsdp_gather_once = true\nA microbatch then has no collectives over data axes to plan: "
                "there is nothing to show. Leave it out; train.py logs what the gathers and sums of a step became."
            )
        if problems:
            raise ConfigError(problems)
        is_float8 = loaded.config.model.is_float8
        hardware = find_hardware(arguments.hardware, float8=is_float8)
    except ValueError as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    forecasts, floors = inspect(loaded.config, world_size, hardware)
    title = f"{loaded.config.model.name} {loaded.config.model.flavor} on {world_size} ranks of {hardware.name}"
    gain = describe_gain(loaded.config, world_size, hardware, forecasts) if is_float8 else []
    print("\n".join([title, "", *table(forecasts, floors), *gain, "", *list_buckets(forecasts)]))
    write_timelines(arguments, forecasts, title)
    return 0


def inspect(config: Config, world_size: int, hardware: Any) -> tuple[list[Any], dict[str, float]]:
    """Trace a step of `config` for rank 0 of `world_size` ranks; return its forecast by plan, and the floors."""
    import torch

    from trainer.distributed import fake_process_group
    from trainer.models.registry import FAMILIES
    from trainer.parallel.overlap.auto import World
    from trainer.parallel.overlap.cost import rings_of
    from trainer.parallel.overlap.forecast import Step, floors, forecast
    from trainer.parallel.overlap.trace import trace
    from trainer.parts import build_loss_of, build_mesh_of, build_partition, build_sharded_model

    if config.parallelism.fsdp_separate_gather_group is None:
        config = replace(config, {"parallelism.fsdp_separate_gather_group": hardware.name.endswith("CPU")})
    training, backend = config.training, config.compile.backend
    with fake_process_group(world_size):
        mesh = build_mesh_of(config, torch.device("cpu"), world_size)
        model = build_sharded_model(config, mesh)
        traced = trace(
            model,
            build_loss_of(config, mesh),
            rows=training.local_batch_size,
            seq_len=training.seq_len,
            partition=dataclasses.replace(build_partition(config), axes=tuple(mesh.axis_of_group().items())),
            backend=backend,
            loss_inside="loss" in config.compile.components,
        )
        step = Step(
            tokens=training.local_batch_size * training.seq_len,
            microbatches=accumulation_steps(config, world_size),
            tp_ranks=mesh.tp_ranks,
            parameter_bytes=traced.parameter_bytes,
            moments=1 if config.optimizer.name == "SGD" else 2,
        )
        world = World(mesh.axis_of_group(), rings_of(mesh), hardware, fuse=backend == "inductor")
        blocks = FAMILIES[config.model.name].blocks
        found = forecast(traced, world, step, blocks=blocks, limit_bytes=hardware.memory_bytes)
        return found, floors(traced, world)


def describe_gain(config: Config, world_size: int, hardware: Any, forecasts: list[Any]) -> list[str]:
    """Return a line for each plan: what the config's step takes, and what it would without float8."""
    section = {f"{SECTION}.{name}": value for name, value in dataclasses.asdict(Float8()).items()}
    plain, _ = inspect(replace(config, {"model.converters": (), **section}), world_size, hardware)
    return [
        f"float8 {found.plan:6} {found.seconds * 1e3:.1f} ms, and {other.seconds * 1e3:.1f} without: predicted gain "
        f"{other.seconds / found.seconds:.2f} times"
        for found, other in zip(forecasts, plain, strict=True)
    ]


def table(forecasts: list[Any], floors: dict[str, float]) -> list[str]:
    """Return the lines of the comparison of plans."""
    lines = [
        f"{'':9} {'plan':6} {'collectives':>11} {'moved GB':>9} {'largest MB':>10} {'exposed ms':>10} {'tp ms':>8} "
        f"{'compute ms':>10} {'ms':>9} {'peak GiB':>8}"
    ]
    for direction, floor in floors.items():
        for found in forecasts:
            candidate = found.direction(direction)
            priced, simulation = candidate.priced, candidate.simulation
            sizes = [max(c.bytes_in, c.bytes_out) for c in priced.collectives.values() if c.is_data]
            lines.append(
                f"{direction:9} {found.plan:6} {len(sizes):11} {sum(sizes) / 1e9:9.2f} "
                f"{max(sizes, default=0) / 1e6:10.1f} {candidate.exposed_seconds * 1e3:10.2f} "
                f"{simulation.exposed_seconds(priced, data=False) * 1e3:8.2f} {priced.compute_seconds() * 1e3:10.1f} "
                f"{simulation.seconds * 1e3:9.1f} {(found.state_bytes + simulation.peak_bytes) / GIB:8.2f}"
            )
        lines.append(f"{direction:9} floor {'':32} {floor * 1e3:10.2f}")
    for found in forecasts:
        lines.append(
            f"{'step':9} {found.plan:6} {found.seconds * 1e3:.1f} ms, {found.tokens_per_second:,.0f} tokens/s "
            f"per rank, peak {found.peak_bytes / GIB:.2f} GiB, {found.state_bytes / GIB:.2f} of them parameters "
            "and moments"
        )
    auto = forecasts[-1]
    chosen = ", ".join(f"{direction} {auto.direction(direction).name}" for direction in floors)
    return [*lines, f"auto has chosen: {chosen}"]


def list_buckets(forecasts: list[Any]) -> list[str]:
    """Return which modules' parameters share a bucket, by plan and direction; equal buckets of blocks in one line."""
    lines = []
    for found in forecasts[1:]:
        for direction in ("forward", "backward"):
            collectives = [c for c in found.direction(direction).priced.collectives.values() if c.is_data]
            lines.append(f"{found.plan}, {direction}:")
            lines += [f"  {line}" for line in _join_equal([_bucket_line(c) for c in collectives])]
    return lines


def _bucket_line(c: Any) -> tuple[str, str]:
    """Return a bucket's name and what it holds, names of modules relative to it."""
    from trainer.parallel.overlap.timeline import name_bucket

    name = name_bucket(c.modules)
    held = ", ".join(module.removeprefix(f"{name}.") for module in c.modules)
    return name, f"{c.kind} {max(c.bytes_in, c.bytes_out) / 1e6:,.1f} MB in {c.dtype_name} over {c.axis}: {held}"


def _join_equal(buckets: list[tuple[str, str]]) -> list[str]:
    runs: list[tuple[list[str], str]] = []
    last: dict[str, int] = {}
    for name, held in buckets:
        place = last.get(held)
        # Gathers and sums alternate in a backward graph, so runs of equal ones are looked for one apart.
        if place is not None and place >= len(runs) - 2:
            runs[place][0].append(name)
        else:
            last[held] = len(runs)
            runs.append(([name], held))
    return [f"{names[0]}{f' to {names[-1]} ({len(names)})' if len(names) > 1 else ''}: {held}" for names, held in runs]


def write_timelines(arguments: argparse.Namespace, forecasts: list[Any], title: str) -> None:
    from trainer.parallel.overlap.timeline import page, perfetto

    if arguments.trace:
        arguments.trace.write_text(json.dumps(perfetto(forecasts)))
        print(f"\nWrote {arguments.trace}: open it at https://ui.perfetto.dev")
    if arguments.html:
        arguments.html.write_text(page(forecasts, title))
        print(f"\nWrote {arguments.html}: open it in a browser")


def config_of_row(row: dict[str, Any]) -> Config:
    """Return the config of a published run, as far as `TRACED_ROWS` goes."""
    mode, option = RECOMPUTE[row["recompute"]]
    float8 = [
        *("--model.converters", "float8"),
        *(f"--{SECTION}.enable_fsdp_float8_all_gather", f"--{SECTION}.precompute_float8_dynamic_scale_for_fsdp"),
    ]
    return load_config(
        [
            *("--config", f"llama3_{row['model'].lower()}.toml"),
            *("--training.seq_len", str(row["seq_len"]), "--training.local_batch_size", str(row["local_batch"])),
            *("--parallelism.tensor_parallel_degree", str(row["mesh"].get("tp", 1))),
            *("--activation_checkpoint.mode", mode, "--activation_checkpoint.selective_ac_option", option),
            *("--compile.components", "model"),  # see docs/inspect_graph.md
            *(float8 if row["float8"] else ()),
        ]
    ).config


def print_published(hardware: str) -> None:
    """Print simulated beside published numbers: one description of the hardware, no setting per row but the run's."""
    import tomli

    from trainer.parallel.overlap.hardware import find_hardware

    rows = {row["id"]: row for row in tomli.loads(PUBLISHED.read_text())["run"]}
    print(
        f"{'row':5} {'ranks':>5} {'tokens/s':>9} {'simulated':>9} {'error':>7} {'GiB':>6} {'simulated':>9} {'error':>7}"
    )
    for name in TRACED_ROWS:
        row = rows[name]
        config = config_of_row(row)
        is_float8 = config.model.is_float8
        block = inspect(config, row["gpus"], find_hardware(hardware, float8=is_float8))[0][1]
        tps, gib = block.tokens_per_second, block.peak_bytes / GIB
        print(
            f"{name:5} {row['gpus']:5} {row['tps']:9,} {tps:9,.0f} {tps / row['tps'] - 1:+7.1%} "
            f"{row['gib']:6.1f} {gib:9.1f} {gib / row['gib'] - 1:+7.1%}"
        )
    print(
        f"Simulated: block plan, on {find_hardware(hardware).source}. "
        "Published: FSDP2, reserved bytes; simulated are live bytes."
    )


if __name__ == "__main__":
    open_door(main)
