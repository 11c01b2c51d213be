"""Hugging Face tokenizers: a `tokenizer.json`, and the names of BOS and EOS from a `tokenizer_config.json` beside it.

Needs the optional package `tokenizers`. Special tokens written out in a text are ordinary text here: a document
that quotes "<|end_of_text|>" does not end there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

JSON_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"

# Used where no tokenizer_config.json says it: Llama 3, Llama 2, GPT-2 and its family (one token for both).
_KNOWN_PAIRS = (
    ("<|begin_of_text|>", "<|end_of_text|>"),
    ("<s>", "</s>"),
    ("<|endoftext|>", "<|endoftext|>"),
)


class HFTokenizer:
    """A Hugging Face tokenizer, given as the texts of its two files; `config` may be empty."""

    def __init__(self, definition: str, config: str) -> None:
        self._tokenizer = _load(definition)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have holes; what a model needs is one more than the largest.
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self._names = _document_names(config, vocabulary)
        self.bos_id, self.eos_id = (vocabulary[name] for name in self._names)
        self._definition = definition
        self.fingerprint = hashlib.sha256(f"{self.bos_id} {self.eos_id}\n{definition}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without BOS or EOS."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; special tokens and ids beyond the vocabulary become nothing."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        """Write the definition, and the names of BOS and EOS."""
        folder.mkdir(parents=True, exist_ok=True)
        bos_name, eos_name = self._names
        (folder / JSON_NAME).write_text(self._definition, encoding="utf-8", newline="")
        names = {"bos_token": bos_name, "eos_token": eos_name}
        config = json.dumps({**names, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2)
        (folder / CONFIG_NAME).write_text(config, encoding="utf-8")

    save_for_hf = save


def _load(definition: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError("reading it needs the package `tokenizers`: pip install -e '.[hf]'") from error
    try:
        tokenizer = Tokenizer.from_str(definition)
    except Exception as error:  # the package raises nothing more precise
        raise ValueError(f"it is not a Hugging Face tokenizer.json ({error})") from error
    # Both may be stored in the file; they would cut or fill documents.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _document_names(config: str, vocabulary: dict[str, int]) -> tuple[str, str]:
    """Return the names of BOS and EOS; a tokenizer with an EOS alone uses it for both."""
    stated = _read_config(config)
    if eos_name := stated.get("eos_token"):
        pairs = [(stated.get("bos_token") or eos_name, eos_name)]
    else:
        pairs = list(_KNOWN_PAIRS)
    for bos_name, eos_name in pairs:
        if bos_name in vocabulary and eos_name in vocabulary:
            return bos_name, eos_name
    names = " or ".join(f"{bos_name} and {eos_name}" for bos_name, eos_name in pairs)
    raise ValueError(
        f"it has no known tokens for the ends of a document (looked for {names}); "
        f'a {CONFIG_NAME} beside it can name them ("bos_token", "eos_token")'
    )


def _read_config(config: str) -> dict[str, str]:
    if not config:
        return {}
    try:
        stated = json.loads(config)
    except json.JSONDecodeError as error:
        raise ValueError(f"the {CONFIG_NAME} beside it is not JSON ({error})") from error
    if not isinstance(stated, dict):
        raise ValueError(f"the {CONFIG_NAME} beside it is not a JSON object")
    # A token is a string, or an object with its string under "content".
    tokens = {key: stated.get(key) for key in ("bos_token", "eos_token")}
    return {key: token["content"] if isinstance(token, dict) else token for key, token in tokens.items() if token}
