"""A save is whole or has not happened, whatever goes wrong and wherever."""

import os
import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks

from trainer.checkpoint import folder as folder_module
from trainer.checkpoint.folder import find_checkpoint, list_checkpoints
from trainer.checkpoint.load import load_tensors
from trainer.checkpoint.rng import random_state, restore_random_state
from trainer.checkpoint.save import save_checkpoint
from trainer.checkpoint.state import read_state

NUM_VALUES = 50_000


def save(folder: Path, step: int, value: float, attach: Callable[[Path], None] | None = None) -> Path:
    """Save on all ranks there are: `value` common to them, and a tensor of each rank's own."""
    group = dist.group.WORLD if dist.is_initialized() else None
    rank = dist.get_rank() if group else 0
    tensors = {"common": torch.full((10,), value), f"own/{rank}": torch.full((NUM_VALUES,), value + rank)}
    return save_checkpoint(folder, step, tensors=tensors, state={"value": value}, attach=attach, process_group=group)


def value_in(path: Path) -> float:
    """Return the value of a checkpoint after reading all of it."""
    common = torch.zeros(10)
    load_tensors(
        path,
        {"common": common, "own/0": torch.zeros(NUM_VALUES)},
        allow_missing=lambda _: False,
        allow_extra=lambda key: key == "own/1",
        process_group=None,
    )
    state = read_state(path)
    assert common.tolist() == [state["value"]] * 10
    return state["value"]


def newest_value(folder: Path) -> float:
    path = find_checkpoint(folder, -1)
    assert path is not None
    return value_in(path)


def kill_this_process(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_rename(number: int) -> None:
    """Let this process be killed just before the rename of that number (from 0) that it makes of a folder of ours."""
    rename, count = Path.rename, 0

    def rename_or_die(path: Path, target: Path) -> Path:
        nonlocal count
        if path.name.startswith("step-"):
            if count == number:
                kill_this_process()
            count += 1
        return rename(path, target)

    Path.rename = rename_or_die  # type: ignore[method-assign]


def _save_on_two(rank: int, folder: Path, step: int, value: float) -> None:
    save(folder, step, value)


def _killed_while_attaching(rank: int, folder: Path) -> None:
    save(folder, 2, 2.0, attach=kill_this_process)


def _killed_at_rename(rank: int, folder: Path, step: int, number: int) -> None:
    kill_at_rename(number)
    save(folder, step, 2.0)


def _killed_while_removing(rank: int, folder: Path) -> None:
    folder_module.shutil.rmtree = kill_this_process  # type: ignore[assignment]
    save(folder, 1, 2.0)


def test_a_kill_in_the_middle_leaves_the_older_one_and_a_rerun_works(tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0)
    with pytest.raises(RankError):
        run_ranks(_killed_while_attaching, 2, tmp_path)
    assert list_checkpoints(tmp_path) == ([1], [("step-2.partial", "the save was not finished")])
    assert newest_value(tmp_path) == 1.0
    run_ranks(_save_on_two, 2, tmp_path, 2, 3.0)
    assert list_checkpoints(tmp_path) == ([1, 2], [])
    assert newest_value(tmp_path) == 3.0


def test_a_kill_before_the_first_checkpoint_is_sealed_leaves_none(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 0 killed by signal 9"):
        run_ranks(_killed_at_rename, 1, tmp_path, 1, 0)
    assert find_checkpoint(tmp_path, -1) is None


# The moves that replace a checkpoint of the same step: the old one aside, the new one in place, the old one renamed
# for removal, and its removal.
@pytest.mark.parametrize(("number", "value"), [(0, 1.0), (1, 1.0), (2, 2.0)])
def test_a_kill_while_replacing_the_only_checkpoint_leaves_it_or_its_successor(
    tmp_path: Path, number: int, value: float
) -> None:
    save(tmp_path, 1, 1.0)
    with pytest.raises(RankError, match="rank 0 killed by signal 9"):
        run_ranks(_killed_at_rename, 1, tmp_path, 1, number)
    assert newest_value(tmp_path) == value
    save(tmp_path, 1, 3.0)
    assert newest_value(tmp_path) == 3.0
    assert sorted(os.listdir(tmp_path)) == ["step-1"]


def test_a_kill_while_removing_the_replaced_one_leaves_its_successor(tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0)
    with pytest.raises(RankError, match="rank 0 killed by signal 9"):
        run_ranks(_killed_while_removing, 1, tmp_path)
    assert newest_value(tmp_path) == 2.0


def message_of_failed_save(*args: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        save(*args)
    return str(caught.value)


def _fail_in_many_ways(rank: int, folder: Path) -> list[str]:
    """Fail on one rank after another, in one group: it must stay in step through all of it."""
    messages = []

    def attach(_: Path) -> None:
        raise ValueError("no tokenizer")

    messages.append(message_of_failed_save(folder, 2, 2.0, attach))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for failing in range(2):
        if rank == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (NUM_VALUES, hard))  # as a full disk: the write is cut short
        messages.append(message_of_failed_save(folder, 2, 2.0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    blocked = folder / "file" / "checkpoint"
    messages.append(message_of_failed_save(blocked, 2, 2.0))
    save(folder, 3, 3.0)
    return messages


def test_a_failure_on_one_rank_is_raised_on_all_and_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 2, 1.0)
    (tmp_path / "file").touch()
    messages, same_messages = run_ranks(_fail_in_many_ways, 2, tmp_path, timeout_seconds=30)
    assert messages == same_messages
    attach, full_on_first, full_on_second, blocked = messages
    assert "rank 0: no tokenizer" in attach
    assert "rank 0: OSError: [Errno 27] File too large" in full_on_first
    assert "rank 1: OSError: [Errno 27] File too large" in full_on_second
    assert "rank 0: NotADirectoryError" in blocked
    assert all("of step 2 was not saved" in message for message in messages)
    assert list_checkpoints(tmp_path) == ([2, 3], [])
    assert value_in(tmp_path / "step-2") == 1.0
    assert sorted(os.listdir(tmp_path)) == ["file", "step-2", "step-3"]


def test_attached_files_are_sealed_with_the_rest(tmp_path: Path) -> None:
    def attach(path: Path) -> None:
        (path / "tokenizer").mkdir()
        (path / "tokenizer" / "tokenizer.model").write_bytes(b"pieces")

    path = save(tmp_path, 1, 1.0, attach)
    (path / "tokenizer" / "tokenizer.model").write_bytes(b"piece")
    ((name, reason),) = list_checkpoints(tmp_path).skipped
    assert name == "step-1"
    assert "tokenizer.model: 5 bytes, its manifest says 6" in reason


def draw() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()


@pytest.mark.parametrize("normals_drawn", [0, 1])
def test_random_numbers_go_on_where_they_were_saved(tmp_path: Path, normals_drawn: int) -> None:
    random.seed(0), np.random.seed(0)
    for _ in range(normals_drawn):  # normal numbers are made in pairs: the second one is part of the state
        random.gauss(0, 1), np.random.randn()
    path = save_checkpoint(tmp_path, 1, tensors=random_state(), state={}, attach=None, process_group=None)
    expected = draw()
    assert draw() != expected
    loaded = random_state()
    load_tensors(path, loaded, allow_missing=lambda _: False, allow_extra=lambda _: False, process_group=None)
    restore_random_state(loaded)
    assert draw() == expected
