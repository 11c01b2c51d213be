"""What a tokenizer is, and finding the one that `model.tokenizer_path` names.

The kinds live in files of their own and say in a ValueError what is wrong with a file; here the setting, the path
and the way out are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from trainer.data.bytes_tokenizer import MARKER_NAME, BytesTokenizer
from trainer.data.hf_tokenizer import CONFIG_NAME, JSON_NAME, HFTokenizer
from trainer.data.sentencepiece_tokenizer import SentencePieceTokenizer

BYTES = "bytes"

_RULE = f'the path is "{BYTES}", a SentencePiece FILE.model, a Hugging Face {JSON_NAME}, or a folder with one of those'
_WAYS_OUT = (
    f"--model.tokenizer_path {BYTES} runs without files; Llama 3.1's tokenizer comes with: "
    "hf download meta-llama/Llama-3.1-8B tokenizer.json tokenizer_config.json --local-dir assets/Llama-3.1-8B"
)


class Tokenizer(Protocol):
    """Text to ids and back. Ids are below `vocab_size`; BOS and EOS stand around a document."""

    vocab_size: int
    bos_id: int
    eos_id: int
    fingerprint: str
    """SHA-256, in hex, of what defines the tokenizer: equal fingerprints encode alike."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without BOS or EOS."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; BOS and EOS become nothing."""
        ...

    def save(self, folder: Path) -> None:
        """Write what `load_tokenizer(str(folder))` needs to return the same tokenizer."""
        ...

    def save_for_hf(self, folder: Path) -> None:
        """Write what Hugging Face's AutoTokenizer loads from a model's folder."""
        ...


def load_tokenizer(path: str) -> Tokenizer:
    """Load the tokenizer at `path`; a ValueError says what is wrong with it."""
    if path == BYTES:
        return BytesTokenizer()
    try:
        return _load_file(_find_file(Path(path).expanduser()))
    except (ValueError, OSError) as error:
        message = f"model.tokenizer_path = {path!r}: {error}. Rule: {_RULE}. Way out: {_WAYS_OUT}"
        raise ValueError(message) from error


def _find_file(path: Path) -> Path:
    if not path.exists():
        raise ValueError("there is no such file or folder")
    if not path.is_dir():
        return path
    for name in (JSON_NAME, MARKER_NAME):
        if (path / name).is_file():
            return path / name
    models = sorted(path.glob("*.model"))
    if len(models) != 1:
        raise ValueError(f"the folder holds no {JSON_NAME} and {len(models)} files *.model, so it names no tokenizer")
    return models[0]


def _load_file(file: Path) -> Tokenizer:
    if file.name == MARKER_NAME:
        return BytesTokenizer()
    if file.suffix == ".json":
        config = file.with_name(CONFIG_NAME)
        return HFTokenizer(_read_text(file), _read_text(config) if config.is_file() else "")
    return SentencePieceTokenizer(file.read_bytes())


def _read_text(file: Path) -> str:
    # Bytes first: text mode would change line ends, and with them the fingerprint.
    return file.read_bytes().decode()
