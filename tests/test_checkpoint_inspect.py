"""A look inside tells what is there and what is wrong with it, and changes nothing."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path

import pytest
import torch

from trainer.checkpoint.save import save_checkpoint

MAIN = runpy.run_path(str(Path(__file__).resolve().parents[1] / "scripts" / "inspect_checkpoint.py"))["main"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        state = {"step": step, "tokens_seen": step * 1000, "mesh": "dp_shard 2", "torch": "2.13.0"}
        experiment = {"optimizer.lr": 0.1 * step, "model.name": "llama3\x1b[2J"}
        save_checkpoint(
            tmp_path,
            step,
            tensors={"a": torch.arange(100.0)},
            state=state | {"experiment": experiment},
            attach=None,
            process_group=None,
        )
    (tmp_path / "step-40.partial").mkdir()
    (tmp_path / "notes.txt").touch()
    return tmp_path


def test_each_step_is_listed_with_what_it_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "step-10" / "state.json").unlink()
    before = sorted(os.walk(folder))
    assert MAIN([str(folder)]) == 1
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].endswith(": 2 complete of 4")
    assert "not complete" in lines[1]
    assert "state.json: No such file" in lines[1]
    assert "step-20" in lines[2]
    assert "20,000 tokens seen, written on dp_shard 2, torch 2.13.0" in lines[2]
    assert "step-40.partial" in lines[4]
    assert "the save was not finished" in lines[4]
    assert "notes.txt" in lines[5]
    assert "  optimizer.lr = 3.0" in lines
    assert lines[lines.index("step-20 differs:") + 1] == "  optimizer.lr = 2.0"
    assert "\x1b" not in printed, "a stranger's text doesn't drive the terminal"
    assert sorted(os.walk(folder)) == before


def test_verifying_reads_every_byte(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert MAIN([str(folder), "--verify", "--json"]) == 0
    contents = json.loads(capsys.readouterr().out)
    assert [entry["verified"] for entry in contents["entries"]] == [True, True, True, False]
    assert contents["entries"][2]["state"]["tokens_seen"] == 30_000
    data = folder / "step-20" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    assert MAIN([str(folder)]) == 0, "sizes alone don't show it"
    assert MAIN([str(folder / "step-20"), "--verify"]) == 1
    assert "__0_0.distcp: damaged" in capsys.readouterr().out
    assert MAIN([str(folder / "absent")]) == 2
