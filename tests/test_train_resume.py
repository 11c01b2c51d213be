"""A run that is cut into launches is the run that was not, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from tiny_run import arguments, assert_equal_weights, launch_all, read_numbers, write_dataset

from trainer.loop import Ending

SPLITS = {"straight": [20], "halves": [10, 20], "parts": [5, 10, 20]}
MOMENTUM = {"optimizer__name": "SGD", "optimizer__momentum": 0.9}


def compiled(backend: str) -> dict[str, Any]:
    return {"compile__enable": True, "compile__backend": backend}


def check_splits(folder: Path, ranks: int, names: list[str], **changes: Any) -> None:
    """Do one run for each name, cut into launches, and compare all with the first."""
    write_dataset(folder)
    launches = [(name, steps) for name in names for steps in SPLITS[name]]
    commands = [arguments(folder, name, training__steps=steps, **changes) for name, steps in launches]
    (results, *_) = run_ranks(launch_all, ranks, commands, timeout_seconds=300)
    assert all(result.ending is Ending.COMPLETED for result in results)
    ends = {name: result.weights for (name, _), result in zip(launches, results, strict=True)}
    expected = read_numbers(folder / names[0])
    assert [step for step, *_ in expected] == list(range(1, 21))
    assert len({loss for _, loss, *_ in expected}) == 20, "the loss was meant to change"
    for name in names[1:]:
        assert read_numbers(folder / name) == expected
        assert_equal_weights(ends[name], ends[names[0]])


@pytest.mark.parametrize(("ranks", "changes"), [(1, {}), (2, {}), (2, MOMENTUM)], ids=["1", "2", "2-momentum"])
def test_a_run_in_parts_is_the_whole_run_bit_for_bit(tmp_path: Path, ranks: int, changes: dict[str, Any]) -> None:
    check_splits(tmp_path, ranks, list(SPLITS), **changes)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "backend", "parts"), [(1, "aot_eager", "parts"), (2, "inductor", "halves")])
def test_a_run_in_parts_is_the_whole_run_whatever_compiles_it(
    tmp_path: Path, ranks: int, backend: str, parts: str
) -> None:
    check_splits(tmp_path, ranks, ["straight", parts], **compiled(backend))


def test_a_resume_moves_to_another_mesh_and_keeps_the_batch_of_the_first_launch(tmp_path: Path) -> None:
    write_dataset(tmp_path)

    def command(name: str, steps: int) -> list[str]:
        return arguments(tmp_path, name, training__steps=steps, training__global_batch_size=-1)

    run_ranks(launch_all, 2, [command("moved", 10), command("stayed", 20)])
    ((moved,),) = run_ranks(launch_all, 1, [command("moved", 20)])
    assert any("2 rows x 1 data ranks x 2 accumulated = 4 rows" in line for line in moved.log)
    numbers, expected = read_numbers(tmp_path / "moved"), read_numbers(tmp_path / "stayed")
    assert [row[0] for row in numbers] == list(range(1, 21))
    for actual, wanted in zip(numbers, expected, strict=True):
        assert actual == pytest.approx(wanted, rel=1e-5)


def test_what_all_ranks_find_in_the_folder_is_told_once(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    run_ranks(launch_all, 1, [arguments(tmp_path, training__steps=2)])
    (tmp_path / "run" / "checkpoint" / "step-9.partial").mkdir()
    command = arguments(tmp_path, training__steps=3, checkpoint__accept_changes="optimizer.lr")
    (first,), (second,) = run_ranks(launch_all, 2, [command])
    assert [line for line in first.log if line.startswith("WARNING")] == [
        "WARNING checkpoint step-9.partial is skipped: the save was not finished",
        "WARNING checkpoint.accept_changes names settings that have not changed: ['optimizer.lr']",
    ]
    assert second.log == []


def test_the_saved_settings_reproduce_the_run(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    first = arguments(
        tmp_path, "first", training__steps=6, training__global_batch_size=-1, lr_scheduler__warmup_steps=2
    )
    first = [argument for argument in first if "total_steps" not in argument]
    again = [f"--config={tmp_path / 'first' / 'config.toml'}", f"--job.dump_folder={tmp_path / 'again'}"]
    run_ranks(launch_all, 1, [first])
    # On another mesh: the file must not pin what only the first machine decided.
    run_ranks(launch_all, 2, [[*again, "--training.local_batch_size=1"]])
    numbers = read_numbers(tmp_path / "again")
    assert len(numbers) == 6
    for actual, wanted in zip(numbers, read_numbers(tmp_path / "first"), strict=True):
        assert actual == pytest.approx(wanted, rel=1e-5)
