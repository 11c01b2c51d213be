"""A configuration as text: `--help`, `--print-config`, and the TOML file that reproduces a run."""

from __future__ import annotations

import textwrap

from trainer.config.arguments import FLAGS
from trainer.config.load import Loaded
from trainer.config.names import SETTINGS
from trainer.config.schema import Config, get
from trainer.config.values import Setting, describe_choices, describe_range, kind_of, write_value

WIDTH = 100
INDENT = " " * 6

_INTRODUCTION = """\
usage: torchrun --nproc-per-node N train.py --config FILE [--section.key VALUE ...]
       python train.py --config FILE [--section.key VALUE ...]

A value comes from the command line, else from the file, else from the file it extends, else it is the default.
A file names the file it extends in its first line: extends = "base.toml". Switches: --x.y, --x.y false, --x.no_y.
Lists: --x.y a,b. Settings whose default is "none" take it as a value. In names, - and _ are the same.
Settings marked "experiment" decide the numbers of a step, and a resume keeps them; those marked "machine" may change
at any launch.
"""


def format_help() -> str:
    """Describe the flags, then every setting: type, unit, default, legal values, half and meaning."""
    lines = [_INTRODUCTION]
    for name, doc in FLAGS.items():
        value = {"config": " FILE", "world_size": " N"}.get(name, "")
        lines.append(f"  {'--' + name.replace('_', '-') + value:<20}{doc}")
    for section, names in _by_section().items():
        lines += ["", f"[{section}]"]
        for name in names:
            lines += _describe(name, SETTINGS[name])
    return "\n".join(lines)


def format_config(loaded: Loaded) -> str:
    """Write every setting with its value and the origin of the value as a comment."""
    values = {name: f"{_key(name)} = {write_value(get(loaded.config, name))}" for name in SETTINGS}
    width = min(max(map(len, values.values())), WIDTH // 2)
    blocks = []
    for section, names in _by_section().items():
        lines = [f"{values[name]:<{width}}  # {loaded.origins[name]}" for name in names]
        blocks.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(blocks)


def to_toml(config: Config, header: str = "") -> str:
    """Write all settings as a TOML file that loads as `config`. Settings that are None are left out."""
    blocks = ["\n".join(f"# {line}".rstrip() for line in header.splitlines())] if header else []
    for section, names in _by_section().items():
        values = {_key(name): get(config, name) for name in names}
        lines = [f"{key} = {write_value(value)}" for key, value in values.items() if value is not None]
        if lines:
            blocks.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def _by_section() -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    for name in SETTINGS:
        sections.setdefault(name.rpartition(".")[0], []).append(name)
    return sections


def _key(name: str) -> str:
    return name.rpartition(".")[2]


def _describe(name: str, setting: Setting) -> list[str]:
    kind, choices = kind_of(setting), describe_choices(setting)
    takes = f"a list of {choices}" if kind.is_list and choices else choices or str(kind)
    facts = [takes, describe_range(setting) or setting.metadata["unit"]]
    facts += [f"default {write_value(setting.default)}", setting.metadata["half"]]
    text = "; ".join(fact for fact in facts if fact)
    return [f"  --{name}", INDENT + text, *_wrap(setting.metadata["doc"])]


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
