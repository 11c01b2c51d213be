from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trainer.data import token_file
from trainer.data.prepare import Prepared, encode, open_sources
from trainer.data.token_file import choose_dtype

TEXTS = [f"document {i}\n" * 3 for i in range(60)]


def prepare(dataset: str, path: str, tokenizer: str, cache: Path) -> Prepared:
    return encode(open_sources(dataset, path, tokenizer, cache), cache)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


def documents_of(prepared: Prepared) -> list[str]:
    """Decode both files, checking that BOS and EOS stand around each document."""
    found = []
    for file in (prepared.training, prepared.held_out):
        ids = np.asarray(file.tokens)
        starts = np.flatnonzero(ids == prepared.tokenizer.bos_id)
        ends = np.flatnonzero(ids == prepared.tokenizer.eos_id)
        assert len(starts) == len(ends) == file.documents
        assert starts[0] == 0
        assert ends[-1] == len(ids) - 1
        assert (starts[1:] == ends[:-1] + 1).all()
        texts = [prepared.tokenizer.decode(ids[a:b].tolist()) for a, b in zip(starts, ends, strict=True)]
        assert sum(len(text.encode()) for text in texts) == file.text_bytes
        found += texts
    return found


def test_every_document_stands_between_bos_and_eos_in_one_file(data: Path, tmp_path: Path) -> None:
    prepared = prepare("text", str(data), "bytes", tmp_path / "cache")
    assert sorted(documents_of(prepared)) == sorted(TEXTS)
    assert prepared.held_out.documents > 0
    assert prepared.training.tokens.dtype == np.uint16


def test_tokens_are_a_read_only_memory_map(data: Path, tmp_path: Path) -> None:
    tokens = prepare("text", str(data), "bytes", tmp_path / "cache").training.tokens
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_fingerprint_is_of_the_content_and_not_of_paths_or_formats(data: Path, tmp_path: Path) -> None:
    jsonl = tmp_path / "same.jsonl"
    jsonl.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    first = prepare("text", str(data), "bytes", tmp_path / "cache").fingerprint
    moved = data.rename(tmp_path / "moved")
    assert prepare("text", str(moved), "bytes", tmp_path / "other").fingerprint == first
    assert prepare("text", f"{moved}/*.txt", "bytes", tmp_path / "cache").fingerprint == first
    assert prepare("jsonl", str(jsonl), "bytes", tmp_path / "cache").fingerprint == first


def test_changed_source_is_noticed(data: Path, tmp_path: Path) -> None:
    first = prepare("text", str(data), "bytes", tmp_path / "cache")
    file = data / "000.txt"
    before = file.stat()
    file.write_text("D" + TEXTS[0][1:])  # the same length
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    second = prepare("text", str(data), "bytes", tmp_path / "cache")
    assert second.fingerprint != first.fingerprint
    assert any(text.startswith("Document 0") for text in documents_of(second))


def test_second_call_reuses_the_files_and_says_so(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trainer.data"):
        first = prepare("text", str(data), "bytes", tmp_path / "cache")
        written = first.training.path.stat().st_mtime_ns
        second = prepare("text", str(data), "bytes", tmp_path / "cache")
    assert second.training.path.stat().st_mtime_ns == written
    assert second.fingerprint == first.fingerprint
    encoded, reused = (message for message in caplog.messages if "bytes per token" in message)
    assert "encoded" in encoded
    assert "reused" in reused


def test_cut_token_file_is_rebuilt(data: Path, tmp_path: Path) -> None:
    first = prepare("text", str(data), "bytes", tmp_path / "cache")
    whole = first.training.path.read_bytes()
    os.truncate(first.training.path, len(whole) // 2)
    second = prepare("text", str(data), "bytes", tmp_path / "cache")
    assert second.training.path.read_bytes() == whole
    assert second.fingerprint == first.fingerprint


def test_skipped_files_are_counted_in_the_log(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (data / "latin.txt").write_bytes(b"\xff")
    with caplog.at_level(logging.INFO, logger="trainer.data"):
        prepare("text", str(data), "bytes", tmp_path / "cache")
    assert "skipped: 1 not_utf8" in caplog.text


@pytest.mark.parametrize("content", ["", "x"])
def test_dataset_without_text_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(ValueError, match=r"training\.dataset_path.*no text to train on"):
        prepare("text", str(tmp_path / "a.txt"), "bytes", tmp_path / "cache")


def test_long_document_is_encoded_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "_SLICE_CHARACTERS", 10)
    text = "0123\n56789abcdefghijklmno\n\n" * 5
    (tmp_path / "a.txt").write_text(text)
    assert "".join(documents_of(prepare("text", str(tmp_path / "a.txt"), "bytes", tmp_path / "cache"))) == text


def test_embedded_corpus_needs_no_files(tmp_path: Path) -> None:
    prepared = prepare("stdlib", "", "bytes", tmp_path / "cache")
    assert prepared.training.documents > 10 * prepared.held_out.documents > 0
    assert prepared.training.text_bytes > 5_000_000


def test_ids_take_two_bytes_while_the_vocabulary_allows_it() -> None:
    assert choose_dtype(2**16).itemsize == 2
    assert choose_dtype(2**16 + 1).itemsize == 4


def test_two_jobs_at_once_share_the_embedded_tokenizer(data: Path, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom trainer.data.prepare import encode, open_sources\n"
        "cache = Path(sys.argv[2])\nprint(encode(open_sources('text', sys.argv[1], '', cache), cache).fingerprint)\n"
    )
    command = [sys.executable, "-c", program, str(data), str(tmp_path / "cache")]
    jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (job.communicate(timeout=60)[0] for job in jobs)
    assert first == second != ""
    prepared = prepare("text", str(data), "", tmp_path / "cache")
    assert prepared.fingerprint == first.strip()
    assert prepared.tokenizer.vocab_size == 4096
    assert sorted(documents_of(prepared)) == sorted(TEXTS)
    names = sorted(path.name for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert [name.split("-")[0] for name in names] == ["text", "tokenizer"]
