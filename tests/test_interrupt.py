"""A signal to any rank stops all of them at one step, with one checkpoint, within a bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from tiny_run import arguments, launch_all, launch_once, read_numbers, read_rows, write_dataset

from trainer.build import Run
from trainer.interrupt import Interrupt
from trainer.loop import Ending

ROOT = Path(__file__).resolve().parents[1]
BOUND_SECONDS = 30  # what torchrun grants


def hear(rank: int) -> list[bool]:
    interrupt = Interrupt(dist.new_group(backend="gloo"))
    interrupt.install()
    heard = [interrupt.requested()]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    dist.barrier()
    heard.append(interrupt.requested())
    assert (signal.getsignal(signal.SIGTERM) == signal.SIG_DFL) == (rank == 1), "a second one ends the process"
    return heard


def test_a_signal_to_one_rank_is_heard_by_all() -> None:
    assert run_ranks(hear, 3) == [[False, True]] * 3


def launch_signalled(rank: int, argv: list[str], step: int, during_validation: bool) -> Any:
    def change(run: Run) -> None:
        """Send rank 1 a signal while it reads its rows of `step`, or while it validates after it."""
        if rank != 1:
            return
        microbatches = run.data.microbatches

        def signalled(completed: int) -> Any:
            if completed == step - 1 and not during_validation:
                os.kill(os.getpid(), signal.SIGINT)
            return microbatches(completed)

        run.data.microbatches = signalled  # type: ignore[method-assign]
        assert run.held_out is not None
        rows = list(run.held_out)

        def validate() -> Iterator[Any]:
            for row in rows:
                if run.state.step == step and during_validation:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield row

        run.held_out = validate()  # type: ignore[assignment]

    return launch_once(argv, change=change)


@pytest.mark.parametrize("during_validation", [False, True])
def test_a_signal_saves_once_and_the_resume_is_bit_identical(tmp_path: Path, during_validation: bool) -> None:
    write_dataset(tmp_path)
    settings = {"training__steps": 8, "validation__enable": True, "validation__freq": 4}
    command, straight = (arguments(tmp_path, name, **settings) for name in ("cut", "straight"))
    results = run_ranks(launch_signalled, 2, command, 4, during_validation)
    assert [result.ending for result in results] == [Ending.INTERRUPTED] * 2
    saved = sorted(path.name for path in (tmp_path / "cut" / "checkpoint").iterdir())
    assert len(saved) == 1
    # Asked for before the step began, or after: ranks agree on the same one.
    assert saved[0] in ("step-4", "step-5")
    assert any("Stopped by a signal after step" in line for line in results[0].log)
    run_ranks(launch_all, 2, [command, straight])
    assert read_numbers(tmp_path / "cut") == read_numbers(tmp_path / "straight")
    assert read_validations(tmp_path / "cut") == read_validations(tmp_path / "straight") != []


def read_validations(dump_folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["validation_loss"]) for row in read_rows(dump_folder, "validation_loss")]


def launch_with_a_signal_at_the_last_step(rank: int, argv: list[str]) -> Any:
    def change(run: Run) -> None:
        agreed = run.interrupt.agreed
        run.interrupt.agreed = lambda: agreed() or run.state.step == 4  # type: ignore[method-assign]

    return [launch_once(argv, change=change), launch_once(argv), launch_once(argv)]


def test_a_validation_that_a_signal_prevented_is_done_once_by_the_resume(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    command = arguments(tmp_path, training__steps=4, validation__enable=True, validation__freq=3)
    for cut, resumed, again in run_ranks(launch_with_a_signal_at_the_last_step, 2, command):
        assert [cut.ending, resumed.ending, again.ending] == [Ending.INTERRUPTED, Ending.COMPLETED, Ending.COMPLETED]
    assert [step for step, _ in read_validations(tmp_path / "run")] == [3, 4]


@contextmanager
def torchrun(folder: Path, **changes: Any) -> Iterator[subprocess.Popen[str]]:
    """Start two ranks for real; whatever is left of them at the end is killed."""
    log = (folder / "log").open("w")
    settings = {"training__steps": 5000, "lr_scheduler__total_steps": 5000, **changes}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(ROOT / "train.py")]
    process = subprocess.Popen(
        [*command, *arguments(folder, **settings)], stdout=log, stderr=log, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        for pid in [*ranks_of(process), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    pids = map(int, children.read_text().split()) if children.exists() else []
    return [pid for pid in pids if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_for_step(folder: Path, process: subprocess.Popen[str], step: int) -> None:
    deadline = time.monotonic() + 120
    metrics = folder / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= step):
        assert time.monotonic() < deadline, (folder / "log").read_text()
        assert process.poll() is None, (folder / "log").read_text()
        time.sleep(0.1)


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "run" / "checkpoint").glob("step-*"))


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("to_torchrun", [False, True], ids=["rank 1", "torchrun"])
def test_sigterm_ends_a_real_run_with_one_checkpoint(tmp_path: Path, to_torchrun: bool) -> None:
    write_dataset(tmp_path)
    with torchrun(tmp_path) as process:
        wait_for_step(tmp_path, process, 3)
        os.kill(process.pid if to_torchrun else ranks_of(process)[1], signal.SIGTERM)
        code = process.wait(timeout=BOUND_SECONDS)
    log = (tmp_path / "log").read_text()
    if not to_torchrun:  # torchrun, told to stop, fails in any case
        assert code == 0, log
    (step,) = saved_steps(tmp_path)
    assert f"Stopped by a signal after step {step} of 5000" in log
    assert not log.count("Rank"), log
    changes = {"lr_scheduler__total_steps": 5000, "training__steps": step + 2}
    run_ranks(launch_all, 2, [arguments(tmp_path, **changes), arguments(tmp_path, "straight", **changes)])
    assert read_numbers(tmp_path / "run") == read_numbers(tmp_path / "straight")


@pytest.mark.slow
@needs_proc
def test_a_signal_before_the_first_step_ends_the_run_at_once(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    with torchrun(tmp_path, compile__enable=True, compile__backend="aot_eager") as process:
        deadline = time.monotonic() + 60
        while "Compiling the model" not in (tmp_path / "log").read_text():
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.02)
        os.kill(ranks_of(process)[0], signal.SIGTERM)
        assert process.wait(timeout=10) != 0
    assert saved_steps(tmp_path) == []


@pytest.mark.slow
@needs_proc
def test_the_death_of_one_rank_ends_the_others(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    with torchrun(tmp_path, checkpoint__interval=2) as process:
        wait_for_step(tmp_path, process, 5)
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        assert process.wait(timeout=BOUND_SECONDS) != 0
    kept = saved_steps(tmp_path)[-1]
    changes = {"lr_scheduler__total_steps": 5000, "training__steps": kept + 2}
    run_ranks(launch_all, 2, [arguments(tmp_path, **changes), arguments(tmp_path, "straight", **changes)])
    assert read_numbers(tmp_path / "run") == read_numbers(tmp_path / "straight")
