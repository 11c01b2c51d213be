"""What disks and people do to checkpoints ends with the cause told and an older checkpoint whole."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from tiny_run import arguments, launch_all, launch_once, read_numbers, write_dataset

import train
from trainer.build import Run
from trainer.checkpoint.folder import list_checkpoints
from trainer.config.load import ConfigError
from trainer.door import EXIT_REFUSED
from trainer.files import hold
from trainer.loop import Ending

MODES = ["disabled", "async"]


def launch_with(rank: int, argv: list[str], step: int, what: str) -> list[Any]:
    """Let the disk change once `step` is done, on the first rank; then launch again."""
    folder = next(Path(part.split("=")[1]) for part in argv if part.startswith("--job.dump_folder")) / "checkpoint"

    def change(run: Run) -> None:
        advance = run.state.advance

        def and_then(tokens: Any) -> None:
            advance(tokens)
            if rank == 0 and run.state.step == step:
                FAULTS[what](folder)

        run.state.advance = and_then  # type: ignore[method-assign]

    failed = launch_once(argv, change=change)
    if rank == 0:
        mend(folder)
    dist.barrier()
    return [failed, launch_once(argv)]


IS_ROOT = os.geteuid() == 0  # to whom permissions mean nothing: a file system of its own must be read-only


def make_read_only(folder: Path) -> None:
    if IS_ROOT:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    else:
        folder.chmod(0o500)


def put_a_file_in_its_place(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.touch()


def cut_the_newest_short(folder: Path) -> None:
    newest = folder / f"step-{list_checkpoints(folder).complete[-1]}" / "__0_0.distcp"
    os.truncate(newest, newest.stat().st_size - 1)


FAULTS = {
    "read-only": make_read_only,
    "not a folder": put_a_file_in_its_place,
    "removed": shutil.rmtree,
    "cut short": cut_the_newest_short,
}


CAUSES = {
    "read-only": ["Read-only file system", "PermissionError"],
    "not a folder": ["NotADirectoryError", "FileExistsError", "FileNotFoundError"],
}


def mend(folder: Path) -> None:
    if folder.is_file():
        folder.unlink()
        folder.with_name("moved").rename(folder)
    if IS_ROOT and folder.is_mount():
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
    elif folder.exists():
        folder.chmod(0o700)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["read-only", "not a folder"])
def test_a_folder_that_takes_no_more_stops_the_run_with_the_cause(tmp_path: Path, what: str, mode: str) -> None:
    write_dataset(tmp_path)
    settings = {"training__steps": 8, "checkpoint__interval": 2, "checkpoint__async_mode": mode}
    folder = tmp_path / "run" / "checkpoint"
    with small_disk(folder, 10_000_000) if IS_ROOT and what == "read-only" else nullcontext():
        for failed, resumed in run_ranks(launch_with, 2, arguments(tmp_path, **settings), 5, what):
            assert "was not saved" in failed.error
            assert any(said in failed.error for said in CAUSES[what]), failed.error
            assert resumed.ending is Ending.COMPLETED
    run_ranks(launch_all, 2, [arguments(tmp_path, "straight", **settings)])
    assert read_numbers(tmp_path / "run") == read_numbers(tmp_path / "straight")


@pytest.mark.parametrize("what", ["removed", "cut short"])
def test_a_run_outlives_the_loss_of_what_it_saved(tmp_path: Path, what: str) -> None:
    write_dataset(tmp_path)
    settings = {"training__steps": 8, "checkpoint__interval": 2}
    for ended, again in run_ranks(launch_with, 2, arguments(tmp_path, **settings), 5, what):
        assert ended.ending is Ending.COMPLETED, ended.error
        assert again.ending is Ending.COMPLETED
    assert list_checkpoints(tmp_path / "run" / "checkpoint").complete[-1] == 8


@contextmanager
def small_disk(disk: Path, num_bytes: int) -> Iterator[None]:
    """Mount a file system of this size."""
    disk.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def launch_on_small_disk(rank: int, argv: list[str], longer: list[str]) -> list[Any]:
    return [launch_once(argv), launch_once(longer)]


@pytest.mark.parametrize("mode", MODES)
def test_a_full_disk_costs_the_save_and_nothing_else(tmp_path: Path, mode: str) -> None:
    write_dataset(tmp_path)
    disk = tmp_path / "disk"
    settings = {"training__steps": 6, "checkpoint__interval": 2, "checkpoint__async_mode": mode}
    command = [*arguments(tmp_path, **settings), f"--checkpoint.folder={disk}"]
    run_ranks(launch_all, 2, [arguments(tmp_path, "straight", **settings)])
    files = [file for file in (tmp_path / "straight" / "checkpoint" / "step-6").rglob("*") if file.is_file()]
    room = sum(file.stat().st_size + 4096 for file in files)
    with small_disk(disk, room * 3 // 2):  # for one checkpoint, and not for a second one
        for failed, again in run_ranks(launch_on_small_disk, 2, command, [*command, "--checkpoint.interval=6"]):
            assert "the checkpoint of step 4 was not saved" in failed.error
            assert "No space left on device" in failed.error
            assert "the checkpoint of step 6 was not saved" in again.error, "what is kept still fills the disk"
        assert list_checkpoints(disk) == ([2], [])
        subprocess.run(["mount", "-o", f"remount,size={room * 4}", str(disk)], check=True)
        run_ranks(launch_all, 2, [command])
    assert read_numbers(tmp_path / "run") == read_numbers(tmp_path / "straight")


def test_a_second_run_in_one_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path)
    (tmp_path / "run").mkdir()
    with hold(tmp_path / "run" / "run.lock"):
        assert train.main(arguments(tmp_path, training__steps=1)) == EXIT_REFUSED
    assert "another run is writing to it" in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoint").exists()


def launch_refused(rank: int, argv: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        launch_once(argv)
    return str(caught.value)


def test_an_explicit_step_that_is_damaged_is_an_error(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    run_ranks(launch_all, 2, [arguments(tmp_path, training__steps=4, checkpoint__interval=2)])
    file = tmp_path / "run" / "checkpoint" / "step-4" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    refused = run_ranks(launch_refused, 2, arguments(tmp_path, training__steps=6, checkpoint__load_step=4))
    assert refused[0] == refused[1]
    assert "__0_0.distcp: damaged" in refused[0]
