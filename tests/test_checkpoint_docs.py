"""The page on checkpoints names what there is."""

import re
import shlex
from pathlib import Path

import tomli

from trainer.config.load import load_config
from trainer.config.schema import Config, settings

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^python ((?:.*\\\n)*.*)$", PAGE, flags=re.MULTILINE)


def test_the_commands_have_programs_and_arguments_that_exist() -> None:
    assert len(COMMANDS) == 8
    for command in COMMANDS:
        program, *arguments = shlex.split(command.replace("\\\n", ""))
        text = (ROOT / program).read_text(encoding="utf-8")
        if program == "train.py":
            load_config(arguments)
            continue
        for argument in arguments:
            assert not argument.startswith("--") or f'"{argument}"' in text, command


def test_the_settings_exist() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    names = [f"checkpoint.{key}" for key in tomli.loads(block)["checkpoint"]]
    names += re.findall(r"`(?:--)?((?:checkpoint|training|lr_scheduler|job)\.[a-z_]+)[ =`]", PAGE)
    assert len(names) > 10
    assert set(names) <= settings(Config).keys()
    for alone in (
        "initial_load_path",
        "exclude_from_loading",
        "last_save_in_hf",
        "last_save_model_only",
        "export_dtype",
    ):
        assert f"`{alone}" in PAGE
        assert f"checkpoint.{alone}" in settings(Config)
