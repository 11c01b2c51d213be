import contextlib
import json
import logging
import os
from pathlib import Path

import pytest

from trainer.metrics.lines import MetricsFile


@pytest.fixture(autouse=True)
def caplog_sees_the_package(monkeypatch):
    monkeypatch.setattr(logging.getLogger("trainer"), "propagate", True)  # `setup_logging` turns it off


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def write(path, steps, resume_step=0):
    file = MetricsFile(path, resume_step)
    for step in steps:
        file.append({"step": step, "loss": 1 / step})
    file.close()


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_floats_come_back_exactly(path):
    write(path, [3, 7])
    assert [row["loss"] for row in read(path)] == [1 / 3, 1 / 7]


def test_a_line_is_on_disk_before_the_file_is_closed(path):
    file = MetricsFile(path, 0)
    file.append({"step": 1})
    assert read(path) == [{"step": 1}]


def test_non_finite_values_become_null_and_are_named(path):
    file = MetricsFile(path, 0)
    file.append({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "lr": 0.5})
    line = path.read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "lr": 0.5,
        "non_finite": ["loss", "grad_norm"],
    }


def test_a_resume_continues_after_its_step(path):
    write(path, range(1, 16))
    write(path, range(11, 21), resume_step=10)
    assert [row["step"] for row in read(path)] == list(range(1, 21))
    assert os.listdir(path.parent) == [path.name]


def test_validation_lines_after_the_resume_step_go_too(path):
    file = MetricsFile(path, 0)
    for row in ({"step": 10, "validation_loss": 2.0}, {"step": 12, "validation_loss": 1.0}):
        file.append(row)
    write(path, [], resume_step=10)
    assert read(path) == [{"step": 10, "validation_loss": 2.0}]


@pytest.mark.parametrize("torn", [b'{"step": 6, "lo', b"{", b'"\xff', b"12", b'{"step": 6, "loss": 1.5}\x00\x00'])
def test_a_torn_last_line_is_dropped_with_a_warning(path, torn, caplog):
    write(path, range(1, 6))
    with path.open("ab") as file:
        file.write(torn)
    write(path, [6, 7], resume_step=5)
    assert [row["step"] for row in read(path)] == list(range(1, 8))
    assert "dropped 1 unreadable line" in caplog.text


def test_a_whole_last_line_without_its_newline_is_kept(path):
    write(path, [1, 2])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    write(path, [3], resume_step=2)
    assert [row["step"] for row in read(path)] == [1, 2, 3]


def test_a_kill_while_cutting_loses_nothing(path, monkeypatch):
    write(path, range(1, 16))

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsFile(path, 10)
    assert [row["step"] for row in read(path)] == list(range(1, 16))


def test_a_new_run_keeps_the_old_file_under_another_name(path):
    for _ in range(3):  # within one second as well
        write(path, [1, 2])
    files = sorted(path.parent.iterdir())
    assert len(files) == 3
    assert files[0] == path
    assert all([row["step"] for row in read(file)] == [1, 2] for file in files)


def test_a_failing_write_names_the_file():
    full = "/dev/full"
    if not os.path.exists(full):
        pytest.skip("needs /dev/full")
    file = MetricsFile(Path(full), 0)
    with pytest.raises(OSError, match=r"cannot write metrics: No space left.*/dev/full"):
        file.append({"step": 1})
    with contextlib.suppress(OSError):  # what is still in the buffer
        file.close()
