"""The arithmetic of problems with a configuration, in words: divisors, long lists, counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_LISTED = 12


def divisors(number: int) -> list[int]:
    """Return the divisors in order; of absurdly large numbers only the smallest and largest, to answer at once."""
    small = [d for d in range(1, min(math.isqrt(number), 2**16) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def list_some(values: Sequence[object]) -> str:
    """List values, the middle left out where there are many."""
    words = [str(value) for value in values]
    if len(words) > MOST_LISTED:
        words = [*words[: MOST_LISTED // 2], "...", *words[-MOST_LISTED // 2 :]]
    return ", ".join(words)


def count_of(number: int, noun: str) -> str:
    """Return "1 rank" or "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
