from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from trainer.data.batches import HeldOutData, Microbatch, TrainingData
from trainer.data.rows import Rows
from trainer.labels import UNCOUNTED

SEQ_LEN = 4
# Rows of step 3, seed 42, of 1000 rows in batches of 8.
GOLDEN_ROWS = [863, 392, 722, 556, 398, 62, 529, 758]


def make_rows(num_rows: int, cut: int = 0) -> Rows:
    """Row i starts with token i * SEQ_LEN; the last one lacks `cut` labels."""
    return Rows(np.arange(num_rows * SEQ_LEN + 1 - cut, dtype="<u4"), SEQ_LEN)


def read_step(
    rows: Rows, step: int, *, data_ranks: int = 1, local: int = 1, total: int = 8, seed: int = 0
) -> list[int]:
    """Return the row indices of a step in the order of data ranks and microbatches."""
    found = []
    for rank in range(data_ranks):
        data = TrainingData(
            rows,
            seed=seed,
            global_batch_size=total,
            local_batch_size=local,
            data_rank=rank,
            data_ranks=data_ranks,
        )
        microbatches = data.microbatches(step)
        assert all(batch.tokens_BT.shape == batch.labels_BT.shape == (local, SEQ_LEN) for batch in microbatches)
        found += [int(row[0]) // SEQ_LEN for batch in microbatches for row in batch.tokens_BT]
    return found


@pytest.mark.parametrize("data_ranks", [1, 2, 4])
@pytest.mark.parametrize("local", [1, 2])
def test_rows_of_a_step_depend_on_neither_data_ranks_nor_local_batch(data_ranks: int, local: int) -> None:
    rows = make_rows(37)
    for step in (0, 1, 4, 5, 1000):
        assert read_step(rows, step, data_ranks=data_ranks, local=local) == read_step(rows, step, local=8)


def test_each_row_is_read_once_an_epoch_also_when_it_ends_in_mid_batch() -> None:
    rows = make_rows(37)
    numbers = [row for step in range(37) for row in read_step(rows, step)]  # 37 steps of 8 rows are 8 epochs
    epochs = [numbers[start : start + 37] for start in range(0, len(numbers), 37)]
    assert len(epochs) == 8
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 8


def test_a_step_may_be_longer_than_an_epoch() -> None:
    assert Counter(read_step(make_rows(3), 0, total=9)) == {0: 3, 1: 3, 2: 3}


def test_seeds_give_different_orders() -> None:
    rows = make_rows(100)
    assert len({tuple(read_step(rows, 0, seed=seed)) for seed in (-1, 0, 1, 2, 2**63)}) == 5


def test_row_order_is_the_same_in_every_release() -> None:
    # A changed order would make resumed runs read other rows than their checkpoint promises.
    assert read_step(make_rows(1000), 3, seed=42) == GOLDEN_ROWS


def test_batches_are_int64_and_labels_follow_tokens() -> None:
    (batch,) = TrainingData(
        make_rows(5), seed=0, global_batch_size=2, local_batch_size=2, data_rank=0, data_ranks=1
    ).microbatches(0)
    assert batch.tokens_BT.dtype == batch.labels_BT.dtype == torch.int64
    assert torch.equal(batch.labels_BT, batch.tokens_BT + 1)


def read_held_out(rows: Rows, *, data_ranks: int, local: int, max_rows: int | None = None) -> list[list[Microbatch]]:
    return [
        list(HeldOutData(rows, local_batch_size=local, data_rank=rank, data_ranks=data_ranks, max_rows=max_rows))
        for rank in range(data_ranks)
    ]


@pytest.mark.parametrize("data_ranks", [1, 2, 4])
@pytest.mark.parametrize("local", [1, 3, 16])
def test_held_out_labels_are_each_counted_once_on_any_ranks(data_ranks: int, local: int) -> None:
    by_rank = read_held_out(make_rows(7, cut=2), data_ranks=data_ranks, local=local)
    labels = torch.cat([batch.labels_BT.flatten() for batches in by_rank for batch in batches])
    assert sorted(labels[labels != UNCOUNTED].tolist()) == list(range(1, 7 * SEQ_LEN - 1))


@pytest.mark.parametrize("data_ranks", [1, 2, 4])
def test_every_data_rank_validates_the_same_number_of_microbatches(data_ranks: int) -> None:
    by_rank = read_held_out(make_rows(5), data_ranks=data_ranks, local=2)
    assert {len(batches) for batches in by_rank} == {-(-5 // (2 * data_ranks))}
    assert all(batch.tokens_BT.shape == (2, SEQ_LEN) for batches in by_rank for batch in batches)


@pytest.mark.parametrize("data_ranks", [1, 2])
def test_limited_validation_reads_rows_spread_evenly(data_ranks: int) -> None:
    by_rank = read_held_out(make_rows(10), data_ranks=data_ranks, local=1, max_rows=4)
    firsts = sorted(
        int(row[0]) // SEQ_LEN
        for batches in by_rank
        for batch in batches
        for row, labels in zip(batch.tokens_BT, batch.labels_BT, strict=True)
        if (labels != UNCOUNTED).any()
    )
    assert firsts == [0, 2, 5, 7]


def test_held_out_rows_come_in_the_same_order_every_time() -> None:
    data = HeldOutData(make_rows(5), local_batch_size=2, data_rank=0, data_ranks=1, max_rows=None)
    first, second = list(data), list(data)
    assert len(first) == 3
    assert all(torch.equal(a.tokens_BT, b.tokens_BT) for a, b in zip(first, second, strict=True))
