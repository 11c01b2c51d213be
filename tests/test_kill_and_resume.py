"""Runs the script that kills a run in its saves, a few times only."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "kill_and_resume.py"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_killed_in_its_saves_ends_with_the_bytes_of_an_undisturbed_one(
    mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runpy.run_path(str(SCRIPT))["main"](["--kills", "2", "--async-mode", mode]) == 0, capsys.readouterr()
    assert "2 kills, 12 steps: the same bytes as undisturbed" in capsys.readouterr().out
