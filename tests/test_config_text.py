"""Laws of printing: a written configuration loads as itself; help and --print-config name everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli

from trainer.config.load import load_config
from trainer.config.schema import Config, replace, settings
from trainer.config.text import format_config, format_help, to_toml
from trainer.config.values import write_value

SETTINGS = settings(Config)
HARD_TEXTS = [
    '"quoted" \\ back\\n',
    "line\nline\r\n\ttab",
    "nul\x00 del\x7f bell\x07",
    "größe 模型 \U0001f600 \u2028",
    "#x",
    "",
]


def reload(text: str, folder: Path) -> Config:
    path = folder / "saved.toml"
    path.write_text(text, encoding="utf-8", newline="")
    return load_config(["--config", str(path)]).config


def settings_in(table: dict[str, Any], prefix: str = "") -> set[str]:
    names: set[str] = set()
    for key, value in table.items():
        names |= settings_in(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key}
    return names


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_a_saved_config_loads_as_itself(text: str, tmp_path: Path) -> None:
    changes = {
        "job.description": text,
        "optimizer.no_decay": (text, "b"),
        "optimizer.lr": 1.2345678901234567e-17,
        "optimizer.eps": 1e16,
        "lr_scheduler.total_steps": 12,
        "model.args.tie_embeddings": False,
        "checkpoint.enable": True,
    }
    config = replace(Config(), changes)
    saved = to_toml(config, header="Written by a run.\n[not] = a section")
    assert reload(saved, tmp_path) == config
    assert saved.startswith("# Written by a run.\n# [not] = a section\n\n[job]\n")


def test_settings_that_are_none_are_left_out_because_none_is_their_default(tmp_path: Path) -> None:
    assert all(setting.default is None for setting in SETTINGS.values() if str(setting.type).endswith("| None"))
    written = settings_in(tomli.loads(to_toml(Config())))
    assert written == {name for name, setting in SETTINGS.items() if setting.default is not None}
    assert reload(to_toml(Config()), tmp_path) == Config()


def test_print_config_shows_every_value_and_its_origin_and_loads_again(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[training]\nsteps = 12\n", encoding="utf-8")
    loaded = load_config(["--config", str(path), "--optimizer.lr=3e-4"])
    lines = [line.split("  # ") for line in format_config(loaded).splitlines() if " = " in line]
    origins = {line.split(" = ")[0].strip(): origin for line, origin in lines}
    assert len(lines) == len(SETTINGS)
    assert origins["steps"].endswith("run.toml:2")
    assert origins["lr"] == "command line"
    assert origins["seq_len"] == "default"
    assert reload(format_config(loaded), tmp_path) == loaded.config


def test_help_names_every_setting_with_default_half_and_meaning() -> None:
    text = format_help()
    words = " ".join(text.split())
    for name, setting in SETTINGS.items():
        entry = words.split(f" --{name} ", 1)[1].split(" --", 1)[0]
        assert f"default {write_value(setting.default)};" in entry, name
        assert setting.metadata["half"] in entry, name
        assert " ".join(setting.metadata["doc"].split()) in words, name
    for flag in ("--config FILE", "--print-config", "--dry-run", "--world-size N", "--help"):
        assert flag in text
