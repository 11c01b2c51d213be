"""A save beside training is the save in step with it, and what goes wrong with it is told on every rank."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny_run import arguments, launch_all, launch_once, read_numbers, write_dataset

from trainer.build import Run
from trainer.checkpoint import save
from trainer.checkpoint.folder import list_checkpoints
from trainer.checkpoint.manifest import read_manifest
from trainer.checkpoint.saver import ASYNC, Progress, Saver
from trainer.config.load import ConfigError
from trainer.loop import Ending

WRITE_DATA = save.FileSystemWriter.write_data


def wrap_writes(before: Callable[[Path], None]) -> None:
    """Call `before` with the partial folder ahead of each write of this rank, in the thread that writes."""

    def write_data(writer: Any, *arguments: Any) -> Any:
        before(Path(writer.path))
        return WRITE_DATA(writer, *arguments)

    save.FileSystemWriter.write_data = write_data  # type: ignore[method-assign]


def launch_slowly(rank: int, commands: list[list[str]]) -> list[Any]:
    """Launch with a disk so slow that steps go on before a tensor is written; note what was complete meanwhile."""
    notes: list[tuple[str, str, list[int]]] = []

    def wait(path: Path) -> None:
        time.sleep(0.05)
        notes.append((path.name, threading.current_thread().name, list_checkpoints(path.parent).complete))

    wrap_writes(wait)
    results = [launch_once(argv) for argv in commands]
    return [results, notes]


def data_seals(checkpoint: Path) -> dict[str, Any]:
    return {name: seal for name, seal in read_manifest(checkpoint).files.items() if name != ".metadata"}


def test_a_save_beside_training_has_the_bytes_of_one_in_step(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    settings = {"training__steps": 8, "checkpoint__interval": 2, "checkpoint__keep_latest_k": 3}
    commands = [arguments(tmp_path, mode, **settings, checkpoint__async_mode=mode) for mode in ("disabled", ASYNC)]
    for results, notes in run_ranks(launch_slowly, 2, commands):
        assert [result.ending for result in results] == [Ending.COMPLETED] * 2
        in_step, beside = notes[:4], notes[4:]
        assert all(thread == "MainThread" for _, thread, _ in in_step)
        *beside, (_, last, _) = beside
        assert all(thread.startswith("checkpoint") for _, thread, _ in beside)
        assert last == "MainThread", "there is nothing more to do beside the last one"
    for step in (4, 6, 8):  # step 2 was superseded
        saved = [tmp_path / mode / "checkpoint" / f"step-{step}" for mode in ("disabled", ASYNC)]
        assert data_seals(saved[0]) == data_seals(saved[1])
        assert len(data_seals(saved[0])) == 4  # of two ranks, the state and the tokenizer
    assert list_checkpoints(tmp_path / ASYNC / "checkpoint") == ([4, 6, 8], [])


def test_there_is_a_complete_checkpoint_at_every_moment(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    settings = {"training__steps": 6, "checkpoint__interval": 1, "checkpoint__keep_latest_k": 1}
    ((_, notes),) = run_ranks(launch_slowly, 1, [arguments(tmp_path, **settings, checkpoint__async_mode=ASYNC)])
    # One is in flight at a time, so each finds the one before, and that alone, complete.
    assert [(name, complete) for name, _, complete in notes] == [
        (f"step-{step}.partial", [step - 1] if step > 1 else []) for step in range(1, 7)
    ]
    assert list_checkpoints(tmp_path / "run" / "checkpoint") == ([6], [])


def launch_with_full_disk(rank: int, argv: list[str]) -> list[Any]:
    """Let rank 1 run out of disk in its second save, then launch again."""
    saves: list[Path] = []

    def fail(path: Path) -> None:
        saves.append(path)
        if rank == 1 and len(saves) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    wrap_writes(fail)
    steps: list[int] = []

    def note(run: Run) -> None:
        hold_updates = run.saver.hold_updates

        def count() -> None:
            steps.append(run.state.step + 1)
            # The write has failed by the end of the step after the save, so that step must be the last.
            while run.state.step == 4 and rank == 1 and run.saver.progress() is Progress.WRITING:
                time.sleep(0.01)
            hold_updates()

        run.saver.hold_updates = count  # type: ignore[method-assign]

    return [launch_once(argv, change=note), steps, launch_once(argv)]


def test_a_failure_of_one_rank_is_raised_on_all_with_its_cause_soon_after(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    settings = {"training__steps": 12, "checkpoint__interval": 2, "checkpoint__async_mode": ASYNC}
    results = run_ranks(launch_with_full_disk, 2, arguments(tmp_path, **settings))
    for failed, steps, resumed in results:
        assert "the checkpoint of step 4 was not saved" in failed.error
        assert "rank 1: OSError: [Errno 28] No space left on device" in failed.error
        # Asked at the start of a step and heard at its end: of a failure during step 5, in step 6.
        assert max(steps) <= 6
        assert resumed.ending is Ending.COMPLETED
    assert any("Resuming from" in line and "step-2:" in line for line in results[0][2].log)
    run_ranks(launch_all, 2, [arguments(tmp_path, "straight", **settings)])
    assert read_numbers(tmp_path / "run") == read_numbers(tmp_path / "straight")


def launch_interrupted(rank: int, argv: list[str], bad_step: int) -> Any:
    """Stop after step 5, while a slow save of step 4 is in flight; by a signal, or by a loss that isn't finite."""
    wrap_writes(lambda path: time.sleep(0.3))

    def change(run: Run) -> None:
        agreed = run.interrupt.agreed
        if not bad_step:
            run.interrupt.agreed = lambda: agreed() or run.state.step == 5  # type: ignore[method-assign]
            return
        accumulate = run.accumulate

        def poisoned(*given: Any) -> torch.Tensor:
            loss = accumulate(*given)
            return loss * float("nan") if run.state.step + 1 == bad_step else loss

        run.accumulate = poisoned

    return launch_once(argv, change=change)


@pytest.mark.parametrize(("bad_step", "saved"), [(0, [4, 5]), (6, [4, 5])], ids=["signal", "not finite"])
def test_a_stop_waits_for_the_save_in_flight(tmp_path: Path, bad_step: int, saved: list[int]) -> None:
    write_dataset(tmp_path)
    settings = {"training__steps": 12, "checkpoint__interval": 4, "checkpoint__async_mode": ASYNC}
    results = run_ranks(launch_interrupted, 2, arguments(tmp_path, **settings), bad_step)
    expected = Ending.NOT_FINITE if bad_step else Ending.INTERRUPTED
    assert [result.ending for result in results] == [expected] * 2
    assert list_checkpoints(tmp_path / "run" / "checkpoint") == (saved, [])


def save_twice(rank: int, folder: Path) -> list[list[int]]:
    saver = Saver(folder, mode=ASYNC, retire=lambda _: None, process_group=dist.group.WORLD)
    weight = torch.ones(1000)
    addresses = []
    for step in (1, 2):
        saver.save(step, tensors={f"own/{rank}": weight}, state={}, attach=None)
        addresses.append([buffer.data_ptr() for buffer in saver._staging._buffers.values()])
        weight += 1
    saver.finish()
    return addresses


def test_later_saves_use_the_memory_of_the_first(tmp_path: Path) -> None:
    for first, second in run_ranks(save_twice, 2, tmp_path):
        assert len(first) == 1
        assert first == second


def launch_refused(rank: int, argv: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        launch_once(argv)
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinned memory has its use here")
def test_pinned_memory_without_a_gpu_is_refused_by_name(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    (message,) = run_ranks(launch_refused, 1, arguments(tmp_path, checkpoint__async_mode="async_with_pinned_mem"))
    assert 'checkpoint.async_mode = "async_with_pinned_mem"' in message
    assert 'Use checkpoint.async_mode = "async"' in message
