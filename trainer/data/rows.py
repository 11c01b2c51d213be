"""Rows: the token file cut into sequences, and the order in which an epoch visits them.

Row i holds the tokens [i*T, (i+1)*T) and as labels the tokens one further on. Rows touch and never overlap, so that
in an epoch every token is a label exactly once (all but the very first). Both maps are computed, never stored.
"""

from __future__ import annotations

import numpy as np

from trainer.labels import UNCOUNTED

_MASK_64 = 2**64 - 1
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
_FEISTEL_ROUNDS = 6
_SMALLEST_HALF_BITS = 3


class Rows:
    """Rows of `seq_len` tokens (T) over a one-dimensional array of N tokens."""

    def __init__(self, tokens: np.ndarray, seq_len: int) -> None:
        assert seq_len > 0
        self._tokens = np.asarray(tokens)  # slices of a plain view are cheaper than those of a memmap
        self.seq_len = seq_len
        self.num_rows = -(-max(len(tokens) - 1, 0) // seq_len)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and labels, int64 [T] each; the last row is filled up with token 0 and UNCOUNTED."""
        assert 0 <= index < self.num_rows
        start = index * self.seq_len
        window = self._tokens[start : start + self.seq_len + 1].astype(np.int64)
        missing = self.seq_len + 1 - len(window)
        if not missing:
            return window[:-1], window[1:]
        tokens = np.pad(window[:-1], (0, missing))
        labels = np.pad(window[1:], (0, missing), constant_values=UNCOUNTED)
        return tokens, labels


def permute(index: int, size: int, key: int) -> int:
    """Return the place of `index` in a pseudo-random permutation of range(size) that `key` chooses.

    A Feistel network permutes a power of four at least `size`; walking its cycle until a value below `size` comes
    keeps it a bijection (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    assert 0 <= index < size
    # Halves of one or two bits mix badly; a small range walks further instead.
    half_bits = max(_SMALLEST_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
    value = _feistel(index, half_bits, key)
    while value >= size:
        value = _feistel(value, half_bits, key)
    return value


def mix(value: int) -> int:
    """Return 64 well-mixed bits of `value`: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value + _GOLDEN_RATIO_64) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _feistel(value: int, half_bits: int, key: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_number in range(_FEISTEL_ROUNDS):
        # Distinct for every round and right half: a half has at most 32 bits for any file there is.
        scrambled = mix(key ^ mix(round_number << 32 | right))
        left, right = right, left ^ (scrambled & mask)
    return left << half_bits | right
