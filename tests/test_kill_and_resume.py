"""Runs the script that kills a run in its saves, a few times only."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "kill_and_resume.py"


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "kills", "steps"), [("disabled", 1, 8), ("async", 2, 12)])
def test_a_run_killed_in_its_saves_ends_with_the_bytes_of_an_undisturbed_one(
    mode: str, kills: int, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--kills", str(kills), "--async-mode", mode]
    assert runpy.run_path(str(SCRIPT))["main"](command) == 0, capsys.readouterr()
    assert f"{kills} kills, {steps} steps: the same bytes as undisturbed" in capsys.readouterr().out
