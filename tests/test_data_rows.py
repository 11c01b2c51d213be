from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from trainer.data.rows import Rows, permute
from trainer.labels import UNCOUNTED

# 99.9 % of fair draws stay below it for up to 19 degrees of freedom.
CHI_SQUARE_LIMIT = 43.8
CHI_SQUARE_LIMIT_OF_ORDERS = 173.6  # the same for the 119 degrees of freedom of the orders of five


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 63, 64, 65, 1000, 4097])
def test_permute_is_a_bijection(size: int) -> None:
    for key in (0, 1, 2**64 - 1):
        assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [2, 3, 5, 20])
def test_permute_puts_each_index_anywhere_equally_often(size: int) -> None:
    draws = 1000
    for index in (0, size - 1):
        counts = Counter(permute(index, size, key) for key in range(draws))
        expected = draws / size
        chi_square = sum((counts[place] - expected) ** 2 / expected for place in range(size))
        assert chi_square < CHI_SQUARE_LIMIT


def test_permute_draws_every_order_of_a_tiny_range_equally_often() -> None:
    draws, orders = 3000, list(itertools.permutations(range(5)))
    counts = Counter(tuple(permute(index, 5, key) for index in range(5)) for key in range(draws))
    expected = draws / len(orders)
    assert sum((counts[order] - expected) ** 2 / expected for order in orders) < CHI_SQUARE_LIMIT_OF_ORDERS


def test_permute_leaves_no_neighbours_together() -> None:
    size = 10_000
    places = [permute(index, size, key=7) for index in range(size)]
    neighbours = sum(abs(a - b) == 1 for a, b in itertools.pairwise(places))
    assert neighbours < 10  # two are expected by chance


def test_permute_takes_ranges_beyond_32_bits() -> None:
    places = {permute(index, 10**12, key=3) for index in range(100)}
    assert len(places) == 100
    assert all(0 <= place < 10**12 for place in places)


@pytest.mark.parametrize("num_tokens", [2, 8, 9, 10, 16, 17, 18])
def test_every_token_but_the_first_is_a_label_exactly_once(num_tokens: int) -> None:
    tokens = np.arange(100, 100 + num_tokens, dtype="<u2")
    rows = Rows(tokens, seq_len=8)
    labels = np.concatenate([rows.row(index)[1] for index in range(rows.num_rows)])
    assert labels[labels != UNCOUNTED].tolist() == tokens[1:].tolist()


def test_labels_are_the_tokens_one_further_on() -> None:
    rows = Rows(np.arange(21, dtype="<u2"), seq_len=8)
    tokens, labels = rows.row(1)
    assert tokens.tolist() == list(range(8, 16))
    assert labels.tolist() == list(range(9, 17))
    assert tokens.dtype == labels.dtype == np.int64


def test_last_row_is_filled_up_without_labels() -> None:
    tokens, labels = Rows(np.arange(5, 16, dtype="<u2"), seq_len=8).row(1)
    assert tokens.tolist() == [13, 14, 0, 0, 0, 0, 0, 0]
    assert labels.tolist() == [14, 15] + [UNCOUNTED] * 6


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_fewer_than_two_tokens_give_no_row(num_tokens: int) -> None:
    assert Rows(np.zeros(num_tokens, "<u2"), seq_len=8).num_rows == 0
