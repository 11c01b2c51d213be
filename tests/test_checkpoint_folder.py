"""The newest complete checkpoint is chosen, the others explained, and nothing of anyone else's is touched."""

import json
import os
from pathlib import Path

import pytest

from trainer.checkpoint import folder as folder_module
from trainer.checkpoint.folder import checkpoint_path, find_checkpoint, list_checkpoints, remove_old
from trainer.checkpoint.manifest import seal_file, write_manifest


def make(folder: Path, step: int, name: str | None = None) -> Path:
    """Make a complete checkpoint of one small file, without tensors."""
    path = folder / (name or f"step-{step}")
    path.mkdir(parents=True)
    (path / "state.json").write_text("{}")
    write_manifest(path, step, {"state.json": seal_file(path / "state.json")})
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_the_newest_complete_step_is_chosen_by_number(tmp_path: Path) -> None:
    for step in (100, 9, 20):
        make(tmp_path, step)
    assert list_checkpoints(tmp_path) == ([9, 20, 100], [])
    assert find_checkpoint(tmp_path, -1) == checkpoint_path(tmp_path, 100)
    assert find_checkpoint(tmp_path, 9) == checkpoint_path(tmp_path, 9)


def test_nothing_there_means_a_fresh_start(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "absent", -1) is None
    assert find_checkpoint(tmp_path, -1) is None


def test_damaged_ones_are_skipped_with_the_reason(tmp_path: Path) -> None:
    make(tmp_path, 1)
    (make(tmp_path, 2) / "state.json").write_text("{")
    (make(tmp_path, 3) / "state.json").unlink()
    (make(tmp_path, 4) / "manifest.json").unlink()
    (make(tmp_path, 5) / "manifest.json").write_text("{")
    make(tmp_path, 6, "step-7")
    make(tmp_path, 8, "step-8.partial")
    (tmp_path / "step-9").touch()
    assert find_checkpoint(tmp_path, -1) == checkpoint_path(tmp_path, 1)
    skipped = "\n".join(f"{name} is skipped: {reason}" for name, reason in list_checkpoints(tmp_path).skipped)
    for part in (
        "step-2/state.json: 1 bytes, its manifest says 2",
        "step-3/state.json: No such file",
        "step-4: there is no manifest.json",
        "step-5/manifest.json: not a valid manifest",
        "step-7: its manifest says step 6",
        "step-8.partial is skipped: the save was not finished",
        "step-9: not a folder",
    ):
        assert part in skipped


def test_a_step_asked_for_must_be_there_whole(tmp_path: Path) -> None:
    make(tmp_path, 1)
    (make(tmp_path, 2) / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"checkpoint.load_step = 3: .*complete: 1 .*Set checkpoint.load_step to"):
        find_checkpoint(tmp_path, 3)
    with pytest.raises(ValueError, match=r"checkpoint.load_step = 2: .*state.json: 1 bytes, its manifest says 2"):
        find_checkpoint(tmp_path, 2)


def test_damage_never_leads_to_a_fresh_start(tmp_path: Path) -> None:
    (make(tmp_path, 2) / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"none is complete .*step-2.*move these folders away"):
        find_checkpoint(tmp_path, -1)


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").touch()
    with pytest.raises(ValueError, match=r"checkpoint.folder: .* is not a folder"):
        find_checkpoint(tmp_path / "checkpoint", -1)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "sub/../../outside", "a\\b", "./state.json", ""])
def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("{}")
    path = make(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"]["state.json"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert "does not stay in the folder" in list_checkpoints(tmp_path).skipped[0][1]


FOREIGN = ["step-007", "step-1x", "step--1", "my-step-3", "best", "step-5.bak", "step-\u0665", "step-"]


def test_only_superseded_checkpoints_of_ours_are_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    for name in FOREIGN:
        make(tmp_path, 3, name)
    (make(tmp_path, 0) / "state.json").unlink()
    make(tmp_path, 5, "step-5.partial")
    before = names_in(tmp_path)
    assert [name for name, _ in list_checkpoints(tmp_path).skipped] == ["step-0", "step-5.partial"]
    remove_old(tmp_path, 0)
    assert names_in(tmp_path) == before
    remove_old(tmp_path, 2)
    assert names_in(tmp_path) == sorted(set(before) - {"step-1", "step-2"})
    remove_old(tmp_path, 1)
    assert names_in(tmp_path) == sorted(set(before) - {"step-1", "step-2", "step-3"})
    assert list_checkpoints(tmp_path).complete == [4]


def test_a_newer_one_that_is_not_complete_does_not_count(tmp_path: Path) -> None:
    make(tmp_path, 1)
    (make(tmp_path, 2) / "manifest.json").unlink()
    make(tmp_path, 3, "step-3.partial")
    remove_old(tmp_path, 1)
    assert find_checkpoint(tmp_path, -1) == checkpoint_path(tmp_path, 1)


def test_a_half_removed_checkpoint_is_never_chosen_and_goes_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        make(tmp_path, step)

    def fail(path: Path) -> None:
        raise PermissionError(f"not allowed: {path.name}")

    with monkeypatch.context() as patch:
        patch.setattr(folder_module.shutil, "rmtree", fail)
        remove_old(tmp_path, 1)
    assert "could not be removed: not allowed" in caplog.text
    assert list_checkpoints(tmp_path) == ([2], [])
    assert names_in(tmp_path) == ["step-1.being_removed", "step-2"]
    remove_old(tmp_path, 1)
    assert names_in(tmp_path) == ["step-2"]


def test_a_replaced_checkpoint_counts_until_its_successor_is_there(tmp_path: Path) -> None:
    make(tmp_path, 1)
    replaced = make(tmp_path, 2, "step-2.replaced")
    assert find_checkpoint(tmp_path, -1) == replaced
    remove_old(tmp_path, 1)
    assert names_in(tmp_path) == ["step-2.replaced"]
    make(tmp_path, 2)
    assert find_checkpoint(tmp_path, -1) == checkpoint_path(tmp_path, 2)
    remove_old(tmp_path, 1)
    assert names_in(tmp_path) == ["step-2"]


def test_a_damaged_folder_in_the_way_is_kept_aside(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "notes.txt").write_text("mine")
    make(tmp_path, 1, "step-1.partial")
    folder_module.publish(tmp_path, 1)
    assert list_checkpoints(tmp_path) == ([1], [])
    assert (tmp_path / "step-1.damaged-1" / "notes.txt").read_text() == "mine"
