"""The numbers of a whole run, as its files tell them, do not depend on the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from tiny_run import arguments, assert_equal_weights, launch_all, read_numbers, read_rows, write_dataset

# Float32 sums in another order; the largest difference seen over 20 steps is 2e-6.
RELATIVE = 1e-5

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "SGD": {"optimizer__name": "SGD", "optimizer__lr": 0.05},
}
VALIDATING = {"validation__enable": True, "validation__freq": 7}


def commands(folder: Path, ranks: int, **changes: Any) -> list[list[str]]:
    return [
        arguments(folder, f"{name}-{ranks}", **{**VALIDATING, **optimizer, **changes})
        for name, optimizer in OPTIMIZERS.items()
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of one process, which has to add up two microbatches."""
    folder = tmp_path_factory.mktemp("parity")
    write_dataset(folder)
    run_ranks(launch_all, 1, commands(folder, 1))
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_metrics_of_a_run_do_not_depend_on_ranks_or_microbatches(folder: Path, ranks: int) -> None:
    changes = {"compile__enable": True, "compile__backend": "aot_eager"} if ranks == 2 else {}
    run_ranks(launch_all, ranks, commands(folder, ranks, training__local_batch_size=1, **changes))
    for name in OPTIMIZERS:
        expected, actual = read_numbers(folder / f"{name}-1"), read_numbers(folder / f"{name}-{ranks}")
        assert len(expected) == len(actual) == 20
        for one, other in zip(actual, expected, strict=True):
            assert one == pytest.approx(other, rel=RELATIVE, abs=0)
        assert_same_validation(folder / f"{name}-{ranks}", folder / f"{name}-1")


def assert_same_validation(actual_folder: Path, expected_folder: Path) -> None:
    expected, actual = (read_rows(path, "validation_loss") for path in (expected_folder, actual_folder))
    assert [row["step"] for row in actual] == [row["step"] for row in expected] == [7, 14, 20]
    for one, other in zip(actual, expected, strict=True):
        assert one["validation_tokens"] == other["validation_tokens"]
        assert -(-one["validation_tokens"] // 16) % 4, "the held-out rows were meant to be uneven"
        assert one["validation_loss"] == pytest.approx(other["validation_loss"], rel=RELATIVE)


def test_validation_sampling_and_saving_do_not_disturb_training(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    quiet = arguments(tmp_path, "quiet", training__steps=8, checkpoint__enable=False)
    busy = arguments(
        tmp_path,
        "busy",
        training__steps=8,
        checkpoint__interval=2,
        sample__tokens=3,
        metrics__enable_tensorboard=True,
        **{**VALIDATING, "validation__freq": 1},
    )
    ((without, between, *_), _) = run_ranks(launch_all, 2, [quiet, busy])
    assert read_numbers(tmp_path / "busy") == read_numbers(tmp_path / "quiet")
    assert len(read_rows(tmp_path / "busy", "validation_loss")) == 8
    assert_equal_weights(between.weights, without.weights)


EIGHT_RANKS = {
    "HSDP and TP": {"parallelism__data_parallel_replicate_degree": 2, "parallelism__tensor_parallel_degree": 2},
    "FSDP and TP": {"parallelism__tensor_parallel_degree": 2},
}


@pytest.mark.slow
def test_eight_ranks_train_and_save_what_one_continues(tmp_path: Path) -> None:
    """Widths that neither axis divides: over 4 x 2 ranks nested shards of one dimension would overlap."""
    write_dataset(tmp_path)
    odd = {"model__args__vocab_size": 259, "model__args__ffn_dim": 50, "training__local_batch_size": 1}
    run_ranks(launch_all, 1, [arguments(tmp_path, "one", **odd)])
    eight = [arguments(tmp_path, name, training__steps=10, **odd, **mesh) for name, mesh in EIGHT_RANKS.items()]
    run_ranks(launch_all, 8, eight, timeout_seconds=400)
    run_ranks(launch_all, 1, [arguments(tmp_path, name, **odd) for name in EIGHT_RANKS])
    expected = read_numbers(tmp_path / "one")
    for name in EIGHT_RANKS:
        actual = read_numbers(tmp_path / name)
        assert len(expected) == len(actual) == 20
        for one, other in zip(actual, expected, strict=True):
            assert one == pytest.approx(other, rel=RELATIVE, abs=0)
