"""A file that is written aside is there wholly or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from trainer.files import flush, hold, write_aside


def test_a_file_is_replaced_when_all_of_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text("old")
    with write_aside(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_ends_in_an_error_leaves_the_old_file_and_nothing_else(error: type, tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text("old")

    def write_half() -> None:
        with write_aside(path) as file:
            file.write(b"ne")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == [path.name]


def test_a_new_name_counts_only_when_content_and_then_name_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[object, bool]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        what = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else os.fstat(descriptor).st_size
        order.append((what, (tmp_path / "x").exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with write_aside(tmp_path / "x") as file:
        file.write(b"content")
    assert order == [(len(b"content"), False), ("folder", True)]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_without_flush_is_taken_and_a_failing_disk_is_not(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(os, "fsync", fsync)
    if number == errno.EIO:
        with pytest.raises(OSError, match="no"):
            flush(tmp_path)
    else:
        flush(tmp_path)


def test_a_lock_is_held_by_one_and_let_go_by_the_end(tmp_path: Path) -> None:
    with hold(tmp_path / "lock"), pytest.raises(BlockingIOError):
        hold(tmp_path / "lock")
    hold(tmp_path / "lock").close()
