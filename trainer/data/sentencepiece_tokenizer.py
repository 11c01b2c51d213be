"""SentencePiece tokenizers: reading a model file, and training one on a corpus.

A model trained here round-trips every valid UTF-8 text exactly. SentencePiece writes a space as U+2581, so
that one character would come back as a space: the text is cut there and the character's three bytes are emitted.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece

MODEL_NAME = "tokenizer.model"
VOCABULARY_PIECES = 4096
# Part of the key under which a trained model is cached: raise it when `train_sentencepiece` changes its result.
TRAINING_VERSION = 1

_SPACE_MARK = "\u2581"
_SENTENCE_CHARACTERS = 2000
_UTF8_BYTES_PER_CHARACTER = 4
# A tiktoken vocabulary (Llama 3's `tokenizer.model`) is lines of "<base64 of the piece> <rank>".
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")


class SentencePieceTokenizer:
    """A SentencePiece model, given as the bytes of its file."""

    def __init__(self, model: bytes) -> None:
        self._model = model
        self._processor = _load_processor(model)
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id, self.eos_id = _document_ids(self._processor)
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self._space_mark_ids = _find_space_mark_ids(self._processor)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without BOS or EOS; text that looks like a control piece stays text."""
        if not self._space_mark_ids or _SPACE_MARK not in text:
            return self._processor.encode(text)
        first, *others = text.split(_SPACE_MARK)
        ids = self._processor.encode(first)
        for part in others:
            ids += self._space_mark_ids
            ids += self._processor.encode(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; BOS, EOS and ids beyond the vocabulary (padding of a model's) become nothing."""
        return self._processor.decode([int(i) for i in ids if 0 <= i < self.vocab_size])

    def save(self, folder: Path) -> None:
        """Write the model file."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MODEL_NAME).write_bytes(self._model)

    def save_for_hf(self, folder: Path) -> None:
        """Write the model file and what its reader there must know."""
        self.save(folder)
        names = {"bos_token": self.bos_id, "eos_token": self.eos_id, "unk_token": self._processor.unk_id()}
        config: dict[str, str | bool] = {key: self._processor.id_to_piece(i) for key, i in names.items()}
        adds_space = self._processor.id_to_piece(self._processor.encode("a"))[0].startswith(_SPACE_MARK)
        config |= {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": adds_space, "legacy": False}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def train_sentencepiece(texts: Iterable[str]) -> bytes:
    """Train a BPE model on `texts` and return the bytes of its file; the same texts give the same bytes."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_cut_into_sentences(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCABULARY_PIECES,
        hard_vocab_limit=True,
        max_sentence_length=_SENTENCE_CHARACTERS * _UTF8_BYTES_PER_CHARACTER,
        # Exact round trip: every byte has a piece, and the text is left as it is.
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        # Source code: indentation is one piece, numbers are not learnt by heart, rare scripts are left to the bytes.
        allow_whitespace_only_pieces=True,
        split_digits=True,
        character_coverage=0.9995,
        # Two threads give other merges than one.
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def _cut_into_sentences(texts: Iterable[str]) -> Iterator[str]:
    # The trainer drops sentences above its limit, so the cut is by size; line ends stay in, to be learnt.
    for text in texts:
        for start in range(0, len(text), _SENTENCE_CHARACTERS):
            yield text[start : start + _SENTENCE_CHARACTERS]


def _load_processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    if _TIKTOKEN_LINE.match(model):
        raise ValueError("it is a tiktoken vocabulary (Llama 3 ships one), not SentencePiece; use its tokenizer.json")
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        problem = f"it is not a SentencePiece model ({len(model)} bytes; is it damaged, or another format?)"
        raise ValueError(problem) from error
    return processor


def _document_ids(processor: sentencepiece.SentencePieceProcessor) -> tuple[int, int]:
    bos_id, eos_id = processor.bos_id(), processor.eos_id()
    if eos_id < 0:
        raise ValueError("its SentencePiece model has no end-of-document piece (eos_id is -1)")
    return (bos_id if bos_id >= 0 else eos_id), eos_id


def _find_space_mark_ids(processor: sentencepiece.SentencePieceProcessor) -> list[int]:
    """Return the byte pieces of U+2581, or nothing where the model cannot give that character back."""
    ids = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_MARK.encode()]
    adds_space = processor.id_to_piece(processor.encode("a"))[0].startswith(_SPACE_MARK)
    has_bytes = all(processor.is_byte(i) for i in ids)
    # A model that puts a space before each text would do so after each cut as well.
    return ids if has_bytes and not adds_space else []
