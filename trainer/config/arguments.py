"""The command line as written: the doors' own flags, and `--section.key value` for every setting.

Owns spelling only: aliases of flags, `-` for `_`, the forms of a switch. Whether a setting exists and takes the value
is `load.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.schema import Config, settings
from trainer.config.v02 import INERT, RENAMED, UNSUPPORTED
from trainer.config.values import COMMAND_LINE, SWITCH_WORDS, Given, kind_of

FLAGS = {
    "config": "File that holds the settings: a path, or a name in configs/ (with or without .toml).",
    "print_config": "Print every setting with its value and where the value comes from.",
    "dry_run": "Build everything at any world size without processes or memory, and print what it would take.",
    "world_size": "Number of ranks that --dry-run and --print-config take for given.",
    "help": "Print this text.",
}
ALIASES = {
    "job.config_file": "config",
    "job.print_config": "print_config",
    "job.print_args": "print_config",
    "h": "help",
}
SWITCHES = ("print_config", "dry_run", "help")


@dataclass
class Flags:
    """The flags of a door that are not settings."""

    print_config: bool = False
    help: bool = False
    dry_run: bool = False
    world_size: int | None = None

    def count_ranks(self) -> int:
        """Return how many ranks there are: as many as --world-size says, else torchrun's, else one."""
        return self.world_size or int(os.environ.get("WORLD_SIZE", 1))


@dataclass
class Arguments:
    """A command line, read: `config` is the file as named, `given` the settings in order."""

    flags: Flags
    config: str | None
    given: list[Given]
    problems: list[str]


def read_arguments(argv: Sequence[str]) -> Arguments:
    """Read a command line without the program's name. What can't be read becomes a problem, not an exception."""
    read = Arguments(Flags(), None, [], [])
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if token != "-h" and (not token.startswith("--") or token == "--"):
            read.problems.append(_stray(token))
            continue
        written, equals, text = token.lstrip("-").partition("=")
        name = written.replace("-", "_")
        name = ALIASES.get(name, name)
        value: Any = text if equals else _take_value(name, tokens)
        if name in FLAGS:
            _set_flag(read, name, value)
        elif value is None:
            read.problems.append(f"{name} ({COMMAND_LINE})\nIts value is missing. Write --{name} VALUE.")
        else:
            read.given.append(_given(name, value))
    return read


def _take_value(name: str, tokens: list[str]) -> str | bool | None:
    """Take the next token as the value of `name`; True for a switch that stands alone, None for a missing value."""
    if _is_negation(name):
        return True
    is_switch = _is_switch(name)
    if tokens and not tokens[0].startswith("-" if is_switch else "--"):
        return tokens.pop(0)
    is_valued = name in FLAGS or _setting(name) is not None
    return True if is_switch or not is_valued else None


def _given(name: str, value: str | bool) -> Given:
    if not _is_negation(name):
        return Given(name, value, COMMAND_LINE)
    positive = name.replace(".no_", ".")
    # `--x.no_y=false` says it twice and means on.
    return Given(positive, SWITCH_WORDS.get(str(value).lower()) is False, COMMAND_LINE)


def _set_flag(read: Arguments, name: str, value: str | bool | None) -> None:
    problem = f"--{name.replace('_', '-')} = {value} ({COMMAND_LINE})\n"
    if name == "config":
        if value is None or value == "":
            read.problems.append("--config (command line)\nThe name of the file is missing. Write --config FILE.")
        else:
            read.config = str(value)
    elif name in SWITCHES:
        switch = SWITCH_WORDS.get(str(value).lower())
        if switch is None:
            read.problems.append(problem + "It takes true or false, or stands alone.")
        setattr(read.flags, name, bool(switch))
    elif isinstance(value, str) and value.isdecimal() and len(value) < 9 and int(value) > 0:
        read.flags.world_size = int(value)
    else:
        read.problems.append(problem + "It takes a whole number of ranks, at least 1. Write --world-size 8.")


def _setting(name: str) -> Any:
    return settings(Config).get(RENAMED.get(name, name))


def _is_switch(name: str) -> bool:
    setting = _setting(name)
    return name in SWITCHES or _is_negation(name) or (setting is not None and kind_of(setting).element is bool)


def _is_negation(name: str) -> bool:
    """Tell whether `name` is `section.no_key` for a switch `section.key`, ours or one that we refuse by name."""
    if ".no_" not in name or _setting(name) is not None:
        return False
    positive = name.replace(".no_", ".")
    return positive in UNSUPPORTED or positive in INERT or (_setting(positive) is not None and _is_switch(positive))


def _stray(token: str) -> str:
    way_out = f"Write --config {token}." if token.endswith(".toml") else "Write --section.key VALUE."
    return f"{token} ({COMMAND_LINE})\nNo flag takes this. {way_out}"
