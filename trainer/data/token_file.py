"""Token files: the ids of documents one after another on disk, written as a stream and read through a memory map.

Each document is BOS, its tokens, EOS. An id takes two bytes where the vocabulary allows it, else four, little-endian
on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from trainer.data.tokenizer import Tokenizer

# Longer documents are encoded slice by slice, so that memory stays bounded.
_SLICE_CHARACTERS = 2**20


@dataclass(frozen=True)
class TokenFile:
    """Encoded documents: `tokens` is a read-only memory map of unsigned integers [N]."""

    path: Path
    tokens: np.ndarray
    documents: int
    text_bytes: int


class TokenWriter:
    """Encodes documents into `file`, open for writing bytes, and counts them."""

    def __init__(self, file: IO[bytes], tokenizer: Tokenizer) -> None:
        self._file = file
        self._tokenizer = tokenizer
        self._dtype = choose_dtype(tokenizer.vocab_size)
        self._digest = hashlib.sha256()
        self.documents = self.tokens = self.text_bytes = 0

    def add(self, text: str) -> None:
        """Append one document."""
        self._write([self._tokenizer.bos_id])
        for part in _slices(text):
            self._write(self._tokenizer.encode(part))
            self.text_bytes += len(part.encode())
        self._write([self._tokenizer.eos_id])
        self.documents += 1

    def facts(self) -> dict[str, Any]:
        """Return the counts and the SHA-256 of what has been written, fit for JSON."""
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "sha256": self._digest.hexdigest(),
        }

    def _write(self, ids: list[int]) -> None:
        content = np.array(ids, self._dtype).tobytes()
        self._digest.update(content)
        self._file.write(content)
        self.tokens += len(ids)


def open_token_file(path: Path, facts: dict[str, Any], vocab_size: int) -> TokenFile:
    """Map a file of which a TokenWriter recorded `facts`."""
    dtype = choose_dtype(vocab_size)
    # An empty file cannot be mapped.
    tokens = np.memmap(path, dtype, mode="r") if facts["tokens"] else np.empty(0, dtype)
    return TokenFile(path, tokens, facts["documents"], facts["text_bytes"])


def choose_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest type that holds every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def _slices(text: str) -> Iterator[str]:
    """Cut `text` after line ends where there are some, so that few tokens differ from those of the whole."""
    start = 0
    while start < len(text):
        end = start + _SLICE_CHARACTERS
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end
