"""Which setting names exist, ours and v0.2's, and what an unknown one may mean."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.config.arguments import FLAGS
from trainer.config.schema import Config, settings
from trainer.config.v02 import INERT, RENAMED, UNSUPPORTED
from trainer.config.values import Given, list_words, nearest

SETTINGS = settings(Config)
NAMES = frozenset([*SETTINGS, *RENAMED, *UNSUPPORTED, *INERT])
OWN_SECTIONS = frozenset(name.rpartition(".")[0] for name in SETTINGS)


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")[:-1]
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


SECTIONS = frozenset(section for name in NAMES for section in _with_parents(name))


def is_known(given: Given) -> bool:
    """Tell whether somebody's name means something here; an empty known section does, and says nothing."""
    return given.name in NAMES or (given.name in SECTIONS and given.value == {})


def find_unknown(givens: Iterable[Given]) -> list[str]:
    """Return a problem for each unknown name; those of one unknown section of a file make one."""
    problems: list[str] = []
    by_section: dict[str, list[Given]] = {}
    for given in givens:
        section = given.name.rpartition(".")[0]
        if is_known(given):
            continue
        if given.name in SECTIONS:
            way_out = f"--{given.name}.KEY VALUE" if given.is_argument else f"[{given.name}], then its keys below it"
            problems.append(f"{given}\nThis is a section. Write {way_out}.")
        elif given.value == {}:
            problems.append(f"{given}\n{_no_section(given.name)}")
        elif section and section not in SECTIONS and not given.is_argument:
            by_section.setdefault(section, []).append(given)
        else:
            problems.append(f"{given}\nThere is no such setting. {_hint(given.name)}")
    return problems + [_unknown_section(section, members) for section, members in by_section.items()]


def suggest(name: str) -> list[str]:
    """Return the settings or flags that an unknown name may mean: same key elsewhere, near key here, near name."""
    section, _, key = name.rpartition(".")
    if same_key := [known for known in SETTINGS if _key(known) == key]:
        return same_key[:3]
    if not section and (flags := nearest(name, FLAGS)):
        return [f"--{flag.replace('_', '-')}" for flag in flags]
    here = [known for known in SETTINGS if known.startswith(f"{section}.")]
    near = nearest(key, [_key(known) for known in here]) or nearest(key, [_key(known) for known in SETTINGS])
    by_key = [known for known in here or SETTINGS if _key(known) in near]
    return by_key[:3] or nearest(name, SETTINGS)


def _key(name: str) -> str:
    return name.rpartition(".")[2]


def _hint(name: str) -> str:
    found = suggest(name)
    return f"Did you mean {list_words(found, 'or')}?" if found else "--help lists all settings."


def _unknown_section(section: str, members: list[Given]) -> str:
    keys = list_words([_key(given.name) for given in members])
    return f"[{section}] with {keys} ({members[0].origin})\n{_no_section(section)}"


def _no_section(section: str) -> str:
    near = nearest(section, OWN_SECTIONS)
    hint = f"Did you mean [{near[0]}]?" if near else f"The sections are {list_words(sorted(OWN_SECTIONS))}."
    return f"There is no such section. {hint}"
