"""Check a machine or cluster before trusting it: `python scripts/verify_parity.py`, or the same under torchrun.

Trains a tiny model, or that of --config, under every mesh that the processes allow, and compares each with one process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.door import EXIT_FAILED, EXIT_REFUSED, open_door

if TYPE_CHECKING:
    from trainer.config.schema import Config
    from trainer.distributed import Place
    from trainer.parity.case import Case
    from trainer.parity.verify import Row

CPU_PROCESSES = 4
CASES_IN_BATCH = 40  # at least
# A case on four processes and two cores: training it, and compiling it before. For the estimate alone.
SECONDS = {"eager": 5.0, "aot_eager": 12.0, "inductor": 40.0}


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags, and the settings for the config."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        epilog="Further --section.key VALUE arguments are settings, as of train.py.",
    )
    parser.add_argument(
        "--config", help="the model, precision, recomputation and batch of a config; default: a tiny model"
    )
    parser.add_argument(
        "--processes", type=int, help="processes to start here; default: one for each GPU, or 4 on CPUs"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--quick", action="store_true", help="every mesh, and every choice once: minutes (default)")
    much.add_argument("--full", action="store_true", help="choices crossed: most of an hour on two cores")
    parser.add_argument("--only", metavar="TEXT", help='cases with this in their name, as "FSDP 2 + TP 2, inductor"')
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table there")
    return parser.parse_known_args(argv)


def main(argv: list[str]) -> int:
    """Return the exit code: 0 all cases agree, 1 some don't, 2 refused before anything started."""
    arguments, settings = parse_arguments(argv)
    from trainer.config.load import ConfigError
    from trainer.ranks import Refused, choose_device, count_ranks

    try:
        device = choose_device(arguments.device)
        processes = count_ranks(arguments.processes, device, flag="--processes", on_cpu=CPU_PROCESSES)
        base = load_base(arguments.config, settings, processes)
        chosen = choose(arguments, base, processes)
    except (ConfigError, Refused) as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    if "RANK" in os.environ:
        return be_rank_of_torchrun(arguments, base, device, *chosen)
    return start_batches(arguments, base, device, processes, *chosen)


def load_base(name: str | None, settings: list[str], processes: int) -> Config:
    """Return the config that all cases start from. ConfigError, or Refused for flags of other doors."""
    from trainer.config.check import check_config
    from trainer.config.load import load_config
    from trainer.parity.choose import TINY_ARGUMENTS, settle
    from trainer.ranks import Refused

    start = TINY_ARGUMENTS if name is None else ["--config", name]
    check = lambda config, _: check_config(settle(config, processes), processes)  # noqa: E731
    loaded = load_config([*start, *settings], check=check)
    flags = loaded.flags
    if flags.dry_run or flags.print_config or flags.world_size:
        raise Refused("--dry-run, --print-config and --world-size belong to train.py. Leave them out")
    return settle(loaded.config, processes)


def choose(arguments: argparse.Namespace, base: Config, processes: int) -> tuple[list[Case], list[str]]:
    """Return the cases, and why others are left out. Refused if there are none."""
    from trainer.parity.choose import choose_full, choose_quick, list_meshes
    from trainer.ranks import Refused

    cases = (choose_full if arguments.full else choose_quick)(base, processes, is_tiny=arguments.config is None)
    if arguments.only is None:
        return cases, list_meshes(base, processes)[1]
    some = [case for case in cases if arguments.only in str(case)]
    if not some:
        raise Refused(f"--only {arguments.only!r}: none of {len(cases)} cases has that in its name, as {cases[-1]!s}")
    return some, [f"--only {arguments.only!r}: all others"]


def without_inductor(cases: list[Case], left_out: list[str], missing: str | None) -> tuple[list[Case], list[str]]:
    """Leave cases out that need a compiler, if `missing` says why there is none."""
    if missing is None:
        return cases, left_out
    return [case for case in cases if case.backend != "inductor"], [*left_out, f"inductor: {missing}"]


def be_rank_of_torchrun(
    arguments: argparse.Namespace, base: Config, device: str, cases: list[Case], left_out: list[str]
) -> int:
    """Check all cases. Every rank returns the same exit code."""
    from trainer.distributed import gather_objects, host_group
    from trainer.parallel.toolchain import find_missing_toolchain
    from trainer.parity.verify import WAIT_SECONDS

    with joined(device) as place:
        missing = gather_objects(find_missing_toolchain(), host_group(WAIT_SECONDS))
        cases, left_out = without_inductor(cases, left_out, next(filter(None, missing), None))
        table = Table(len(cases), place.world_size)
        if place.rank == 0:
            table.print_start(cases, left_out)
        failed = check(cases, base, place, table)
        if place.rank == 0:  # before the ranks part, as the first one to leave with a failure ends all
            table.print_end()
            table.write(arguments.markdown, left_out, device)
    return EXIT_FAILED if failed else 0


def start_batches(
    arguments: argparse.Namespace, base: Config, device: str, processes: int, cases: list[Case], left_out: list[str]
) -> int:
    """Check the cases in batches, each on ranks of its own, so that one which dies costs no other batch."""
    from trainer.parallel.toolchain import find_missing_toolchain
    from trainer.ranks import start_ranks

    cases, left_out = without_inductor(cases, left_out, find_missing_toolchain())
    table = Table(len(cases), processes)
    table.print_start(cases, left_out)
    code = 0
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        rows = Path(folder, "rows")
        for batch in batches_of(cases):
            rows.write_bytes(b"")
            code = max(code, start_ranks(processes, device, be_rank_of_batch, batch, base, device, table, rows))
            table.take(read_rows(rows), batch)
    table.print_end()
    table.write(arguments.markdown, left_out, device)
    return code if code == 0 else EXIT_FAILED


def batches_of(cases: list[Case]) -> list[list[Case]]:
    """Cut between cases of different meshes: those of one compare their bits."""
    batches: list[list[Case]] = []
    for case in cases:
        if batches and (len(batches[-1]) < CASES_IN_BATCH or batches[-1][-1].mesh == case.mesh):
            batches[-1].append(case)
        else:
            batches.append([case])
    return batches


def be_rank_of_batch(cases: list[Case], base: Config, device: str, table: Table, rows: Path) -> int:
    """Check the cases and leave their rows in a file. Every rank returns the same exit code."""
    with joined(device) as place:
        failed = check(cases, base, place, table, rows)
    return EXIT_FAILED if failed else 0


def read_rows(path: Path) -> list[Row]:
    """Read what a rank of this very command has written."""
    rows = []
    with path.open("rb") as file:
        while file.peek(1):
            rows.append(pickle.load(file))
    return rows


@contextlib.contextmanager
def joined(device: str) -> Iterator[Place]:
    """Be one rank among the others."""
    from dataclasses import replace

    import torch

    from trainer.distributed import find_place, process_group
    from trainer.parity.verify import WAIT_SECONDS

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else deterministic matmuls are refused
    place = find_place()
    if device == "cpu":
        place = replace(place, device=torch.device("cpu"))
    with process_group(place, WAIT_SECONDS):
        yield place


def check(cases: list[Case], base: Config, place: Place, table: Table, rows: Path | None = None) -> bool:
    """Collective over all ranks. Check the cases, rank 0 printing their rows; return whether one fails."""
    from trainer.parity.verify import verify

    failed = False
    for row in verify(cases, base, place):
        failed = failed or bool(row.failures)
        if place.rank == 0:
            table.print_row(row)
            if rows:
                with rows.open("ab") as file:
                    pickle.dump(row, file)
    return failed


class Table:
    """The table, printed row by row."""

    def __init__(self, count: int, processes: int) -> None:
        self._count, self._processes = count, processes
        self._rows: list[Row] = []
        self._start = time.monotonic()

    def print_start(self, cases: Iterable[Case], left_out: list[str]) -> None:
        seconds = sum(SECONDS[case.backend] for case in cases)
        print(f"{self._count} cases on {self._processes} processes: about {seconds / 60:.0f} minutes on two CPU cores")
        for reason in left_out:
            print(f"left out: {reason}")
        print(f"\n{'':9}{'case':66}{'loss':>9}{'norm':>9}{'weights':>9}  result  seconds", flush=True)

    def print_row(self, row: Row) -> None:
        self._rows.append(row)
        distances = "".join(f"{value:9.1e}" for value in _distances(row))
        number = f"{len(self._rows)}/{self._count}"
        print(
            f"{number:9}{row.case!s:66}{distances}  {'FAIL' if row.failures else 'PASS'}  {row.seconds:8.1f}",
            flush=True,
        )
        for failure in row.failures:
            print(f"{'':9}  {failure}", flush=True)

    def take(self, rows: list[Row], batch: list[Case]) -> None:
        """Add the rows of a batch, which its rank has printed. The case after the last one is what it died of."""
        from trainer.parity.verify import died

        self._rows += rows
        if len(rows) < len(batch):
            self.print_row(died(batch[len(rows)]))
            print(f"{'':9}  the {len(batch) - len(rows) - 1} cases after it in its batch were not checked", flush=True)

    def print_end(self) -> None:
        print(f"\n{self._summary()}", flush=True)

    def _summary(self) -> str:
        failed = sum(bool(row.failures) for row in self._rows)
        verdict = f"{failed} FAILED" if failed else "all PASS"
        return f"{len(self._rows)} cases: {verdict}, {(time.monotonic() - self._start) / 60:.1f} minutes"

    def write(self, path: Path | None, left_out: list[str], device: str) -> None:
        """Write the table with what it takes to repeat it, if there is a path."""
        if path:
            path.write_text("\n".join(self._to_markdown(left_out, device)) + "\n", encoding="utf-8")

    def _to_markdown(self, left_out: list[str], device: str) -> Iterator[str]:
        import torch

        device = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} CPU cores"
        yield f"# Parity: {self._summary()}\n"
        yield f"    python {shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}\n"
        yield f"- {time.strftime('%Y-%m-%d')}, {self._processes} processes on {platform.machine()}, {device}"
        yield f"- Python {platform.python_version()}, PyTorch {torch.__version__}"
        yield from (f"- left out: {reason}" for reason in left_out)
        yield "\nLoss and norm: largest relative difference over the steps; weights: largest absolute one after them.\n"
        yield "| case | loss | norm | weights | result | seconds |\n|---|---:|---:|---:|---|---:|"
        for row in self._rows:
            values = " | ".join(f"{value:.1e}" for value in _distances(row))
            result = "FAIL: " + "; ".join(row.failures) if row.failures else "PASS"
            yield f"| {row.case} | {values} | {result} | {row.seconds:.1f} |"


def _distances(row: Row) -> tuple[float, float, float]:
    return row.distance.loss, row.distance.norm, row.distance.weights


if __name__ == "__main__":
    open_door(main)
