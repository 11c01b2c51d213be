"""The configuration page tells the truth: its files load, and its commands print what it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config.load import load_config
from trainer.config.schema import Config, settings
from trainer.config.v02 import RENAMED, UNSUPPORTED

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```console\n\$ (.*)\n((?:.*\n)*?)```", PAGE)
FILES = re.findall(r"```toml\n# (.*)\n((?:.*\n)*?)```", PAGE)
TABLE = re.findall(r"^\| (`--.*`) \|", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_command_prints_what_the_page_shows(command: str, output: str, tmp_path: Path) -> None:
    for name, text in FILES:
        (tmp_path / name).write_text(f"# {name}\n{text}", encoding="utf-8")
    program = f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT / 'train.py'))}"
    done = subprocess.run(
        command.replace("python train.py", program), shell=True, capture_output=True, text=True, cwd=tmp_path
    )
    printed = (done.stdout + done.stderr).replace(f"{ROOT}/", "")
    assert printed.rstrip() == output.rstrip()


def test_every_code_block_is_one_of_those_tested() -> None:
    assert len(COMMANDS) == 4
    assert len(FILES) == 2
    assert PAGE.count("```") == 2 * (len(COMMANDS) + len(FILES))


def test_the_forms_of_arguments_that_the_page_lists_are_taken() -> None:
    forms = [form for cell in TABLE for form in re.findall(r"`(.*?)`", cell)]
    assert len(forms) == 8
    for form in forms:
        name = shlex.split(form)[0].split("=")[0].removeprefix("--").replace(".no_enable", ".enable")
        assert load_config(shlex.split(form)).origins[name] == "command line"


def test_every_name_of_a_setting_on_the_page_exists() -> None:
    known = settings(Config).keys() | RENAMED.keys() | UNSUPPORTED.keys()
    sections = {name.split(".")[0] for name in known}
    names = re.findall(r"`(?:--)?([a-z_]+(?:\.[a-z_0-9]+)+)", PAGE)
    assert {name for name in names if name.split(".")[0] in sections} <= known | {"compile.no_enable"}
