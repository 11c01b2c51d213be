"""Batches: which rows a data rank reads in a step, as tensors.

The rows of step s are a function of (seed, s) alone. How many data ranks there are, and how many rows fit at once,
only decides who reads which of them and when. Nothing is remembered between steps, so a resume needs no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from trainer.data.rows import Rows, mix, permute
from trainer.labels import UNCOUNTED


@dataclass(frozen=True)
class Microbatch:
    """Rows that go through the model at once: int64 on the CPU, B rows of T tokens."""

    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor


class TrainingData:
    """The training rows, epoch after epoch, each epoch in an order of its own."""

    def __init__(
        self,
        rows: Rows,
        *,
        seed: int,
        global_batch_size: int,
        local_batch_size: int,
        data_rank: int,
        data_ranks: int,
    ) -> None:
        assert 0 <= data_rank < data_ranks
        assert rows.num_rows > 0, "no text to train on is found when it is encoded"
        assert global_batch_size > 0
        assert global_batch_size % (local_batch_size * data_ranks) == 0, "refused with the other settings"
        self._rows = rows
        self._seed = seed
        self._global_batch_size = global_batch_size
        self._local_batch_size = local_batch_size
        self._rows_per_rank = global_batch_size // data_ranks
        self._first_row = data_rank * self._rows_per_rank

    def microbatches(self, step: int) -> list[Microbatch]:
        """Return this data rank's rows of the step that follows `step` completed updates."""
        assert step >= 0
        first = step * self._global_batch_size + self._first_row
        starts = range(first, first + self._rows_per_rank, self._local_batch_size)
        return [self._read(start) for start in starts]

    def _read(self, start: int) -> Microbatch:
        rows = (self._row_index(number) for number in range(start, start + self._local_batch_size))
        return _stack([self._rows.row(index) for index in rows])

    def _row_index(self, number: int) -> int:
        """Return the row that the run visits as its `number`-th; an epoch may end in the middle of a batch."""
        epoch, position = divmod(number, self._rows.num_rows)
        return permute(position, self._rows.num_rows, key=mix(mix(self._seed) ^ epoch))


class HeldOutData:
    """The held-out rows, or `max_rows` of them spread evenly, in a fixed order.

    Every data rank iterates over the same number of microbatches; rows that are missing at the end have no labels,
    so a sum of losses divided by the number of labels does not depend on the ranks.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        local_batch_size: int,
        data_rank: int,
        data_ranks: int,
        max_rows: int | None,
    ) -> None:
        assert 0 <= data_rank < data_ranks
        self._num_rows = rows.num_rows if max_rows is None else min(rows.num_rows, max_rows)
        assert self._num_rows > 0, "a dataset has at least one document, or a part of one, that is held out"
        self._rows = rows
        self._local_batch_size = local_batch_size
        self._first_row = data_rank * local_batch_size
        self._stride = data_ranks * local_batch_size

    def __iter__(self) -> Iterator[Microbatch]:
        for start in range(0, self._num_rows, self._stride):
            first = start + self._first_row
            yield _stack([self._row(number) for number in range(first, first + self._local_batch_size)])

    def _row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        if number < self._num_rows:
            return self._rows.row(number * self._rows.num_rows // self._num_rows)
        seq_len = self._rows.seq_len
        return np.zeros(seq_len, np.int64), np.full(seq_len, UNCOUNTED, np.int64)


def _stack(rows: list[tuple[np.ndarray, np.ndarray]]) -> Microbatch:
    tokens = np.stack([tokens for tokens, _ in rows])
    labels = np.stack([labels for _, labels in rows])
    return Microbatch(torch.from_numpy(tokens), torch.from_numpy(labels))
