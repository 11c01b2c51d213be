"""From the settings to token files: open the dataset and the tokenizer, encode once, use the cache ever after.

The cache key is what the result depends on, so a changed source file or tokenizer is noticed. The fingerprint is of
the result: equal tokens from another path, machine or cache have the same one.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece

from trainer.data.cache import CacheEntry, build_once
from trainer.data.documents import Documents, Split, open_documents, split_documents
from trainer.data.sentencepiece_tokenizer import (
    MODEL_NAME,
    TRAINING_VERSION,
    SentencePieceTokenizer,
    train_sentencepiece,
)
from trainer.data.standard_library import StandardLibrary
from trainer.data.token_file import TokenFile, TokenWriter, open_token_file
from trainer.data.tokenizer import Tokenizer, load_tokenizer

# Raise it when the same documents and tokenizer would give other files.
_FORMAT_VERSION = 1
_SECONDS_BETWEEN_REPORTS = 30

# What belongs in the folders that the shipped configs read.
_DOWNLOADS = {
    "c4": "allenai/c4 --repo-type dataset --include 'en/c4-train.0000*.json.gz'",
    "Llama-3.1-8B": "meta-llama/Llama-3.1-8B tokenizer.json tokenizer_config.json",
    "Llama-2-7b": "meta-llama/Llama-2-7b-hf tokenizer.json tokenizer_config.json",
}
_WITHOUT_FILES = (
    'To run without any such file: --training.dataset stdlib --training.dataset_path "" --model.tokenizer_path bytes'
)

logger = logging.getLogger("trainer.data")


@dataclass(frozen=True)
class Prepared:
    """A dataset ready for training. `fingerprint` is a SHA-256 of its tokens and tokenizer."""

    tokenizer: Tokenizer
    training: TokenFile
    held_out: TokenFile
    fingerprint: str


@dataclass(frozen=True)
class Sources:
    """What a dataset is made from: found and open, nothing encoded yet."""

    dataset: str
    documents: Documents
    tokenizer: Tokenizer


class SourceError(ValueError):
    """What is missing or broken, all at once, each with the command that gets it."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def open_sources(dataset: str, dataset_path: str, tokenizer_path: str, cache_folder: Path) -> Sources:
    """Find documents and tokenizer; SourceError names both if both are missing.

    An empty `tokenizer_path` means the tokenizer of the embedded corpus, trained at its first use. Safe to call from
    several processes at once: one works, the others wait.
    """
    problems: list[str] = []
    documents: Documents | None = None
    tokenizer: Tokenizer | None = None
    try:
        documents = open_documents(dataset, dataset_path)
    except ValueError as error:
        problems.append(f"{error}{_how_to_get(dataset_path)}")
    try:
        tokenizer = load_tokenizer(tokenizer_path) if tokenizer_path else _embedded_tokenizer(cache_folder)
    except ValueError as error:
        problems.append(f"{error}{_how_to_get(tokenizer_path)}")
    if documents is None or tokenizer is None:
        raise SourceError([*problems[:-1], f"{problems[-1]}\n{_WITHOUT_FILES}"])
    return Sources(dataset, documents, tokenizer)


def encode(sources: Sources, cache_folder: Path) -> Prepared:
    """Return the token files of a dataset, encoding it if the cache lacks them. Safe to call as `open_sources` is."""
    dataset, documents, tokenizer = sources.dataset, sources.documents, sources.tokenizer
    key = _key(_FORMAT_VERSION, dataset, documents.identity(), tokenizer.fingerprint)
    started = time.perf_counter()
    entry = build_once(cache_folder, f"{dataset}-{key}", lambda folder: _encode(documents, tokenizer, folder))
    _report(dataset, entry, time.perf_counter() - started)
    return _open(entry, tokenizer)


def _how_to_get(path: str) -> str:
    """Return the command that fills the folder of a shipped config, if `path` leads through one."""
    folder = Path(path)
    for place in (folder, *folder.parents):
        if place.name in _DOWNLOADS:
            return f"\nGet it with: hf download {_DOWNLOADS[place.name]} --local-dir {place}"
    return ""


def _embedded_tokenizer(cache_folder: Path) -> Tokenizer:
    corpus = StandardLibrary()

    def train(folder: Path) -> dict[str, Any]:
        logger.info("training a tokenizer on the embedded corpus (once; some seconds)")
        texts = (text for split, text in split_documents(corpus) if split is Split.TRAINING)
        (folder / MODEL_NAME).write_bytes(train_sentencepiece(texts))
        return {}

    key = _key(TRAINING_VERSION, sentencepiece.__version__, corpus.identity())
    entry = build_once(cache_folder, f"tokenizer-{key}", train)
    return SentencePieceTokenizer((entry.folder / MODEL_NAME).read_bytes())


def _encode(documents: Documents, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Write both token files and return the facts about them."""
    logger.info("encoding documents (once; then they come from the cache)")
    with (
        open(_token_path(folder, Split.TRAINING), "wb") as training_file,
        open(_token_path(folder, Split.HELD_OUT), "wb") as held_out_file,
    ):
        training, held_out = TokenWriter(training_file, tokenizer), TokenWriter(held_out_file, tokenizer)
        writers = {Split.TRAINING: training, Split.HELD_OUT: held_out}
        reported = time.perf_counter()
        for split, text in split_documents(documents):
            writers[split].add(text)
            if time.perf_counter() - reported > _SECONDS_BETWEEN_REPORTS:
                reported = time.perf_counter()
                logger.info("encoding: %s tokens so far", f"{training.tokens + held_out.tokens:,}")
    if not training.documents:
        raise ValueError(
            "training.dataset_path: the dataset holds no text to train on "
            f"(skipped: {documents.skipped}). Rule: at least two characters of text. "
            "Way out: correct the path, or --training.dataset stdlib, which needs no files"
        )
    facts: dict[str, Any] = {split.value: writer.facts() for split, writer in writers.items()}
    return facts | {"skipped": documents.skipped, "format": _FORMAT_VERSION, "tokenizer": tokenizer.fingerprint}


def _open(entry: CacheEntry, tokenizer: Tokenizer) -> Prepared:
    training, held_out = (
        open_token_file(_token_path(entry.folder, split), entry.facts[split.value], tokenizer.vocab_size)
        for split in (Split.TRAINING, Split.HELD_OUT)
    )
    contents = [entry.facts[split.value]["sha256"] for split in Split]
    fingerprint = hashlib.sha256("\n".join([tokenizer.fingerprint, *contents]).encode()).hexdigest()
    return Prepared(tokenizer, training, held_out, fingerprint)


def _report(dataset: str, entry: CacheEntry, seconds: float) -> None:
    training, held_out = (entry.facts[split.value] for split in (Split.TRAINING, Split.HELD_OUT))
    tokens = training["tokens"] + held_out["tokens"]
    skipped = ", ".join(f"{count} {reason}" for reason, count in entry.facts["skipped"].items() if count)
    logger.info(
        "dataset %s %s: %s training and %s held-out documents, %s tokens, %.2f bytes per token, %.1f s%s",
        dataset,
        "encoded" if entry.built_now else "reused from the cache",
        f"{training['documents']:,}",
        f"{held_out['documents']:,}",
        f"{tokens:,}",
        (training["text_bytes"] + held_out["text_bytes"]) / tokens,
        seconds,
        f"; skipped: {skipped}" if skipped else "",
    )


def _token_path(folder: Path, split: Split) -> Path:
    return folder / f"{split.value}.bin"


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
