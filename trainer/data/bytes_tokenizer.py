"""The tokenizer that needs no file: one id for each of the 256 bytes, then BOS and EOS."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

MARKER_NAME = "tokenizer.bytes"  # the file `save` leaves, so that a folder says which tokenizer it holds
_MARKER_TEXT = "ids 0-255: bytes; 256: beginning of document; 257: end of document\n"


class BytesTokenizer:
    """UTF-8 bytes as ids."""

    vocab_size = 258
    bos_id = 256
    eos_id = 257
    fingerprint = hashlib.sha256(_MARKER_TEXT.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of `text`."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD, ids that are no byte become nothing."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Write the marker file that `load_tokenizer` recognises."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER_NAME).write_text(_MARKER_TEXT)
