"""The tokenizer that needs no file: one id for each of the 256 bytes, then BOS and EOS."""

from __future__ import annotations

import hashlib
import json
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

    def save_for_hf(self, folder: Path) -> None:
        """Write byte-level BPE without merges, which yields the same ids."""
        folder.mkdir(parents=True, exist_ok=True)
        names = {"bos_token": "<bos>", "eos_token": "<eos>"}
        special = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        vocabulary = {character: byte for byte, character in enumerate(_characters_of_bytes())}
        definition = {
            "version": "1.0",
            "added_tokens": [{"id": ids[key], "content": names[key], **special} for key in names],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
        (folder / "tokenizer.json").write_text(json.dumps(definition, ensure_ascii=False), encoding="utf-8")
        config = json.dumps({**names, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2)
        (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")


def _characters_of_bytes() -> list[str]:
    """Return the character by which byte-level BPE writes each byte: its own where that is printable (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
