"""Documents: the texts of a dataset in a stable order, and which of them are held out for validation.

Knows nothing of tokens. What is read from where is in `standard_library.py` and `local_files.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from enum import Enum
from typing import Protocol

from trainer.data.local_files import JsonLines, TextFiles
from trainer.data.standard_library import StandardLibrary

HELD_OUT_ONE_IN = 20


class Documents(Protocol):
    """A dataset's texts. Iterating twice gives the same texts in the same order while the files stay the same."""

    skipped: dict[str, int]
    """Why documents were left out, and how many, in the last full iteration."""

    def identity(self) -> str:
        """Return a string that changes when the texts may have changed."""
        ...

    def __iter__(self) -> Iterator[str]: ...


class Split(Enum):
    """The two parts of a dataset."""

    TRAINING = "training"
    HELD_OUT = "held_out"


def open_documents(dataset: str, dataset_path: str) -> Documents:
    """Find the dataset of `training.dataset` and `training.dataset_path`; no text is read yet."""
    if dataset == "stdlib":
        assert not dataset_path, "refused with the other settings"
        return StandardLibrary()
    kinds: dict[str, type[TextFiles | JsonLines]] = {"text": TextFiles, "jsonl": JsonLines}
    return kinds[dataset](dataset_path)


def split_documents(documents: Documents) -> Iterator[tuple[Split, str]]:
    """Yield each text with its part, in order; empty texts are left out.

    A document's part depends on its content: it does not change sides when others come or go, and copies of it
    are never on both sides. Only the last one may be moved, so that neither part is empty; a document that is
    alone is cut in two.
    """
    used: set[Split] = set()
    for text, is_last in _with_last(text for text in documents if text):
        if is_last and not used:
            yield from _cut_in_two(text)
            return
        split = _split_of(text)
        if is_last and used == {split}:
            split = Split.TRAINING if split is Split.HELD_OUT else Split.HELD_OUT
        used.add(split)
        yield split, text


def _split_of(text: str) -> Split:
    digest = hashlib.sha256(text.encode()).digest()
    return Split.HELD_OUT if int.from_bytes(digest[:8], "little") % HELD_OUT_ONE_IN == 0 else Split.TRAINING


def _cut_in_two(text: str) -> Iterator[tuple[Split, str]]:
    cut = len(text) - max(1, len(text) // HELD_OUT_ONE_IN)
    if cut:
        yield Split.TRAINING, text[:cut]
    yield Split.HELD_OUT, text[cut:]


def _with_last(texts: Iterator[str]) -> Iterator[tuple[str, bool]]:
    previous: str | None = None
    for text in texts:
        if previous is not None:
            yield previous, False
        previous = text
    if previous is not None:
        yield previous, True
