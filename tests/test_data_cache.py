from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.data.cache import build_once

SECONDS_TO_WAIT = 20.0

# Builds entry "x", leaving a line in builds.txt; waits in mid-build until the file "go" is there.
BUILDER = """
import logging, sys, time
from pathlib import Path
from trainer.data.cache import build_once

root = Path(sys.argv[1])
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)

def build(folder):
    with open(root / "builds.txt", "a") as builds:
        builds.write("built\\n")
    (folder / "half").write_text("half")
    while not (root / "go").exists():
        time.sleep(0.01)
    (folder / "data").write_text("whole")
    return {"answer": 42}

entry = build_once(root / "cache", "x", build)
print((entry.folder / "data").read_text(), entry.facts["answer"], flush=True)
"""


def build_two_files(folder: Path) -> dict[str, Any]:
    (folder / "a").write_text("aaa")
    (folder / "b").write_text("bb")
    return {"answer": 42}


def refuse_to_build(folder: Path) -> dict[str, Any]:
    raise AssertionError("built although it was there")


def start_builder(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(root)], stdout=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_WAIT
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def test_an_entry_is_built_once(tmp_path: Path) -> None:
    first = build_once(tmp_path, "x", build_two_files)
    second = build_once(tmp_path, "x", refuse_to_build)
    assert (first.built_now, second.built_now) == (True, False)
    assert first.facts == second.facts == {"answer": 42}
    assert sorted(file.name for file in second.folder.iterdir()) == ["a", "b", "manifest.json"]


def test_processes_that_start_at_once_build_once_and_agree(tmp_path: Path) -> None:
    builders = [start_builder(tmp_path) for _ in range(3)]
    wait_for(tmp_path / "cache/x.partial/half")
    time.sleep(0.3)  # so that the others reach the lock and say that they wait
    (tmp_path / "go").touch()
    outputs = [builder.communicate(timeout=SECONDS_TO_WAIT)[0] for builder in builders]
    assert (tmp_path / "builds.txt").read_text() == "built\n"
    assert all(output.endswith("whole 42\n") for output in outputs)
    assert all(output.count("waiting for another process that prepares x") <= 1 for output in outputs)


def test_a_waiting_process_says_so_once(tmp_path: Path) -> None:
    first = start_builder(tmp_path)
    wait_for(tmp_path / "cache/x.partial/half")
    second = start_builder(tmp_path)
    assert second.stdout is not None
    assert "waiting for another process that prepares x" in second.stdout.readline()
    (tmp_path / "go").touch()
    assert second.communicate(timeout=SECONDS_TO_WAIT)[0] == "whole 42\n"
    first.communicate(timeout=SECONDS_TO_WAIT)


def test_a_killed_builder_leaves_nothing_that_is_taken_for_complete(tmp_path: Path) -> None:
    builder = start_builder(tmp_path)
    wait_for(tmp_path / "cache/x.partial/half")
    builder.send_signal(signal.SIGKILL)
    builder.communicate()
    entry = build_once(tmp_path / "cache", "x", build_two_files)
    assert entry.built_now
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["x", "x.lock"]
    assert not (entry.folder / "half").exists()


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> dict[str, Any]:
        (folder / "half").write_text("half")
        raise ValueError("a bad document")

    with pytest.raises(ValueError, match=r"^a bad document$"):
        build_once(tmp_path, "x", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["x.lock"]


@pytest.mark.parametrize("damage", ["cut file", "lost file", "lost manifest", "cut manifest", "foreign manifest"])
def test_a_damaged_entry_is_noticed_and_built_anew(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = build_once(tmp_path, "x", build_two_files).folder
    if damage == "cut file":
        (folder / "a").write_text("aa")
    elif damage == "lost file":
        (folder / "b").unlink()
    elif damage == "lost manifest":
        (folder / "manifest.json").unlink()
    elif damage == "cut manifest":
        (folder / "manifest.json").write_text('{"facts"')
    else:
        (folder / "manifest.json").write_text("[]")
    with caplog.at_level(logging.WARNING, logger="trainer.data"):
        assert build_once(tmp_path, "x", build_two_files).built_now
    assert str(folder) in caplog.text
    assert (folder / "a").read_text() == "aaa"
    assert not build_once(tmp_path, "x", refuse_to_build).built_now


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(ValueError, match=r"training\.cache_folder = .*file.*Way out: --training\.cache_folder"):
            build_once(folder, "x", build_two_files)


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    def fill(folder: Path) -> dict[str, Any]:
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match=r"training\.cache_folder = .*No space left"):
        build_once(tmp_path, "x", fill)
    assert not (tmp_path / "x").exists()
