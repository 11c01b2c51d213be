"""One value of one setting: what it may be, how it reads from a command line, how it is written as TOML.

Knows the facts that `schema.py` declares about a setting and no setting by name. Where values come from and which one
wins is `load.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tomli

Setting = dataclasses.Field[Any]

COMMAND_LINE = "command line"
NONE = "none"
TYPES: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
TAKES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
SWITCH_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
LARGEST_INTEGER = 2**63 - 1  # TOML's integers have 64 bits
LONGEST_SHOWN = 100


@dataclass(frozen=True)
class Given:
    """A value somebody wrote: the name as written, and where ("configs/x.toml:12" or "command line")."""

    name: str
    value: Any
    origin: str

    @property
    def is_argument(self) -> bool:
        return self.origin == COMMAND_LINE

    def __str__(self) -> str:
        if self.value == {}:
            return f"[{self.name}] ({self.origin})"
        value = str(self.value) if self.is_argument else write_value(self.value)
        if len(value) > LONGEST_SHOWN:
            value = value[:LONGEST_SHOWN] + "..."
        return f"{self.name} = {value} ({self.origin})"


@dataclass(frozen=True)
class Kind:
    """The type of a setting: `element`, a list of it, or None besides."""

    element: type
    is_list: bool
    is_optional: bool

    def __str__(self) -> str:
        name = f"a list of {TAKES[self.element]}s" if self.is_list else TAKES[self.element]
        return f"{name}, or none" if self.is_optional else name


def kind_of(setting: Setting) -> Kind:
    """Return the kind of a setting from its annotation, which `schema.py` keeps as text."""
    text = str(setting.type)
    is_optional = text.endswith(" | None")
    text = text.removesuffix(" | None")
    element = text.removeprefix("tuple[").removesuffix(", ...]")
    return Kind(TYPES[element], text != element, is_optional)


def read_text(setting: Setting, text: str) -> Any:
    """Read text of a command line as the setting's type; text that does not read so comes back unchanged."""
    kind = kind_of(setting)
    if kind.is_optional and text.lower() == NONE:
        return None
    if kind.is_list:
        return [_read_element(kind.element, part) for part in _split(text)]
    return _read_element(kind.element, text)


def _read_element(element: type, text: str) -> Any:
    if element is bool:
        return SWITCH_WORDS.get(text.lower(), text)
    try:
        return element(text)
    except ValueError:
        return text


def _split(text: str) -> list[str]:
    """Split "a,b", and also '["a", "b"]' and what a shell leaves of it, "[a, b]"."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        try:
            return [part if isinstance(part, str) else str(part) for part in tomli.loads(f"list = {text}")["list"]]
        except ValueError:
            # Not one of our patterns: those have a character before the bracket, so nothing is lost by the reading.
            text = text[1:-1]
    parts = [part.strip().strip("\"'") for part in text.split(",")]
    return [part for part in parts if part]


def check_value(setting: Setting, value: Any) -> Any:
    """Return `value` as the setting's type. ValueError with the rule and a way out when it breaks one."""
    kind = kind_of(setting)
    if value is None or (kind.is_optional and kind.element is not str and value == NONE):
        if kind.is_optional:
            return None
        raise ValueError(f"It takes {kind}, not none. {_leave_out(setting)}")
    if kind.is_list:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"It takes {kind}, not {_describe(value)}. Write {write_value([value])}.")
        return tuple(_check_element(setting, kind, element) for element in value)
    return _check_element(setting, kind, value)


def _check_element(setting: Setting, kind: Kind, value: Any) -> Any:
    if kind.element is float and type(value) is int and abs(value) <= LARGEST_INTEGER:
        value = float(value)
    if type(value) is not kind.element:
        raise ValueError(f"It takes {kind}, not {_describe(value)}. {_correct(setting, kind, value)}")
    if isinstance(value, str):
        _check_unicode(value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"It takes a finite number. {_leave_out(setting)}")
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise ValueError(f"It takes a whole number of 64 bits. {_leave_out(setting)}")
    choices = setting.metadata["choices"]
    if choices and value not in choices:
        raise ValueError(f"It must be {describe_choices(setting)}.{nearest_hint(str(value), choices)}")
    if not _is_in_range(setting, value):
        raise ValueError(f"It must be {describe_range(setting)}. {_leave_out(setting)}")
    return value


def _check_unicode(value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("It takes text that is valid Unicode. Check the terminal's encoding, or rename.") from None


def _is_in_range(setting: Setting, value: Any) -> bool:
    facts = setting.metadata
    if facts["minimum"] is not None and value < facts["minimum"]:
        return False
    if facts["maximum"] is not None and value > facts["maximum"]:
        return False
    return facts["above"] is None or value > facts["above"]


def describe_range(setting: Setting) -> str:
    """Describe the legal numbers, unit included: "at least 1 row"; empty when all are."""
    facts = setting.metadata
    rules = [
        f"{word} {facts[name]}"
        for name, word in (("above", "above"), ("minimum", "at least"), ("maximum", "at most"))
        if facts[name] is not None
    ]
    unit = f" ({facts['unit']})" if facts["unit"] else ""
    return " and ".join(rules) + unit if rules else ""


def describe_choices(setting: Setting) -> str:
    """List the legal words: '"inductor" or "aot_eager"'; empty when any word is legal."""
    return list_words([write_value(choice) for choice in setting.metadata["choices"]], "or")


def list_words(words: Iterable[str], last: str = "and") -> str:
    """Join words as a sentence does: "a, b and c"."""
    *first, end = list(words) or [""]
    return f"{', '.join(first)} {last} {end}" if first else end


def nearest(name: str, names: Iterable[str], limit: int = 1) -> list[str]:
    """Return the names most like `name`, best first."""
    by_lower = {known.lower(): known for known in names}
    return [by_lower[match] for match in difflib.get_close_matches(name.lower()[:LONGEST_SHOWN], list(by_lower), limit)]


def nearest_hint(name: str, names: Iterable[str]) -> str:
    """Return " Did you mean ...?" for the nearest of `names`, or nothing when none is near."""
    return "".join(f" Did you mean {write_value(match)}?" for match in nearest(name, names))


def _leave_out(setting: Setting) -> str:
    return f"Leave it out for the default, {write_value(setting.default)}."


def _correct(setting: Setting, kind: Kind, value: Any) -> str:
    """Name the value that was probably meant."""
    if kind.element is str and not isinstance(value, (list, dict)):
        return f'Put it in quotes: "{write_value(value)}".'
    if kind.element is int and isinstance(value, float) and value.is_integer():
        return f"Write {int(value)}."
    meant = _read_element(kind.element, value if isinstance(value, str) else write_value(value))
    return f"Write {write_value(meant)}." if type(meant) is kind.element else _leave_out(setting)


def _describe(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, dict):
        return "a table"
    return {int: "a whole number", float: "a number with a fraction", str: "text"}.get(type(value), "a date or time")


def write_value(value: Any) -> str:
    """Write a value as TOML; None, which TOML lacks, as "none", which `check_value` takes where None is legal."""
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's, save that TOML wants U+007F escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(write_value(element) for element in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {write_value(element)}" for key, element in value.items()) + "}"
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return f"{value:#x}"  # Python refuses to write very long numbers in decimal
    return str(value)
