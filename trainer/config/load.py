"""From a command line to a configuration: defaults, then the files (`extends` first), then `--section.key value`.

Owns precedence, the origin of every value, and the list of all problems at once. How files and command lines are read
is `files.py` and `arguments.py`, which names exist `names.py`, what a value may be
`values.py`, and what v0.2's names mean `v02.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.arguments import Arguments, Flags, read_arguments
from trainer.config.files import find_file, read_files
from trainer.config.names import NAMES, SETTINGS, find_unknown, is_known, suggest
from trainer.config.schema import Config, replace
from trainer.config.v02 import RENAMED, UNSUPPORTED, VALUE_ALIASES, VALUE_HINTS, find_refusal
from trainer.config.values import Given, check_value, read_text

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DEFAULT = "default"

Check = Callable[[Config, Flags], list[str]]


class ConfigError(ValueError):
    """What is wrong with a configuration: all problems at once."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        blocks = [problem.replace("\n", "\n      ") for problem in self.problems]
        return f"The configuration has {count}:\n" + "".join(f"\n  - {block}\n" for block in blocks)


@dataclass(frozen=True)
class Loaded:
    """A configuration, and for every dotted setting where its value comes from."""

    config: Config
    origins: dict[str, str]
    flags: Flags


def load_config(argv: Sequence[str], *, folder: Path = CONFIGS, check: Check | None = None) -> Loaded:
    """Load what a command line (without the program's name) asks for. ConfigError with all problems.

    `check` adds the problems between settings; those of settings that are wrong already are left out. `--help` is
    answered whatever else is wrong.
    """
    arguments = read_arguments(argv)
    if arguments.flags.help:
        return Loaded(Config(), dict.fromkeys(SETTINGS, DEFAULT), arguments.flags)
    problems = list(arguments.problems)
    layers = _read_layers(arguments, folder, problems)
    is_whole = len(problems) == len(arguments.problems)
    chosen = _choose(layers, problems)
    config = _fill(chosen, problems)
    doubtful = _meant(layers) | _names_in("\n".join(problems))
    problems += _refusals(chosen, config)
    origins = {name: chosen[name].origin if name in chosen else DEFAULT for name in SETTINGS}
    if check is not None and is_whole:
        found = [problem for problem in check(config, arguments.flags) if not doubtful & _names_in(problem)]
        problems += [problem + _origins_of(problem, origins) for problem in found]
    if problems:
        raise ConfigError(problems)
    return Loaded(config, origins, arguments.flags)


def _read_layers(arguments: Arguments, folder: Path, problems: list[str]) -> list[list[Given]]:
    layers: list[list[Given]] = []
    if arguments.config is not None:
        try:
            path = find_file(arguments.config, folder)
        except ValueError as error:
            problems.append(f"--config {arguments.config}\n{error}")
        else:
            try:
                layers = read_files(path, folder)
            except ValueError as error:
                problems.append(str(error))
    return [*layers, arguments.given]


def _choose(layers: list[list[Given]], problems: list[str]) -> dict[str, Given]:
    """Map known settings, ours and v0.2's, to the last value given."""
    chosen: dict[str, Given] = {}
    for layer in layers:
        problems += find_unknown(layer)
        of_layer: dict[str, Given] = {}
        for given in layer:
            name = RENAMED.get(given.name, given.name)
            if given.name not in NAMES:
                continue
            other = of_layer.get(name, given)
            if other.name != given.name and _value(name, other) != _value(name, given):
                problems.append(f"{given}\nIt is another name of {other}, with another value. Keep one of the two.")
            of_layer[name] = given
        chosen |= of_layer
    return chosen


def _fill(chosen: dict[str, Given], problems: list[str]) -> Config:
    """Return the configuration; a setting whose value is wrong has its default, and adds a problem."""
    values: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        if name not in chosen:
            continue
        given = chosen[name]
        try:
            values[name] = check_value(setting, _value(name, given))
        except ValueError as error:
            renamed = f"{given.name} is called {name} now. " if given.name != name else ""
            hint = VALUE_HINTS.get(name, {}).get(given.value, "") if isinstance(given.value, str) else ""
            problems.append(f"{given}\n{renamed}{error} {hint}".rstrip())
    return replace(Config(), values)


def _value(name: str, given: Given) -> Any:
    setting = SETTINGS.get(name)
    value = given.value
    if setting is not None and given.is_argument and isinstance(value, str):
        value = read_text(setting, value)
    return VALUE_ALIASES.get(name, {}).get(value, value) if isinstance(value, str) else value


def _refusals(chosen: dict[str, Given], config: Config) -> Iterator[str]:
    for name, given in chosen.items():
        if name in UNSUPPORTED and (refusal := find_refusal(given, config)):
            yield f"{given}\n{refusal}"


def _meant(layers: list[list[Given]]) -> set[str]:
    """Return the settings that unknown names may mean, and whose values are doubtful for that."""
    return {name for layer in layers for given in layer if not is_known(given) for name in suggest(given.name)}


def _names_in(problem: str) -> set[str]:
    return set(re.findall(r"\b\w+(?:\.\w+)+", problem)) & SETTINGS.keys()


def _origins_of(problem: str, origins: dict[str, str]) -> str:
    """Say where the settings that a problem names come from; the problem has their values."""
    names = [name for name in SETTINGS if name in _names_in(problem) and origins[name] != DEFAULT]
    return f"\nGiven: {', '.join(f'{name} ({origins[name]})' for name in names)}." if names else ""
