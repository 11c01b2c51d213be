from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.data.documents import Split, open_documents, split_documents
from trainer.data.local_files import JsonLines, TextFiles
from trainer.data.standard_library import StandardLibrary


class GivenTexts:
    """A dataset in memory."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self.skipped: dict[str, int] = {}

    def identity(self) -> str:
        return repr(self.texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)


def split(texts: list[str]) -> dict[Split, list[str]]:
    parts: dict[Split, list[str]] = {part: [] for part in Split}
    for part, text in split_documents(GivenTexts(texts)):
        parts[part].append(text)
    return parts


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# The split


def test_about_one_in_twenty_documents_is_held_out() -> None:
    parts = split([f"document {i}" for i in range(4000)])
    assert 150 <= len(parts[Split.HELD_OUT]) <= 250
    assert sum(map(len, parts.values())) == 4000


def test_a_document_keeps_its_side_when_others_come() -> None:
    texts = [f"document {i}" for i in range(100)]
    before = split([*texts, "end"])
    after = split(["new", *reversed(texts), "newer", "end"])
    assert set(before[Split.HELD_OUT]) - {"end"} == set(after[Split.HELD_OUT]) - {"new", "newer", "end"}


def test_copies_of_a_document_are_on_one_side() -> None:
    texts = [f"document {i}" for i in range(100)]
    parts = split(texts * 3)
    assert not set(parts[Split.HELD_OUT]) & set(parts[Split.TRAINING])


@pytest.mark.parametrize("count", [2, 3, 5, 20])
def test_neither_side_is_empty_with_two_documents_or_more(count: int) -> None:
    for start in range(200):
        parts = split([f"document {start + i}" for i in range(count)])
        assert parts[Split.HELD_OUT]
        assert parts[Split.TRAINING]


def test_a_single_document_is_cut_near_its_end() -> None:
    text = "".join(chr(i) for i in range(1000))
    assert split([text, ""]) == {Split.TRAINING: [text[:950]], Split.HELD_OUT: [text[950:]]}
    assert split(["ab"]) == {Split.TRAINING: ["a"], Split.HELD_OUT: ["b"]}


# The standard library


def test_standard_library_is_read_in_the_order_of_paths_without_tests(tmp_path: Path) -> None:
    for name in ["b.py", "a/z.py", "a.py", "test/x.py", "a/tests/x.py", "__pycache__/x.py", "site-packages/x.py"]:
        write(tmp_path / name, name)
    write(tmp_path / "a/data.txt", "no source")
    write(tmp_path / "latin.py", b"\xff")
    documents = StandardLibrary(tmp_path)
    assert list(documents) == ["a.py", "a/z.py", "b.py"]
    assert documents.skipped == {"not_utf8": 1}


def test_standard_library_of_this_python_is_some_megabytes() -> None:
    assert sum(map(len, StandardLibrary())) > 5_000_000


def test_standard_library_identity_follows_names_and_contents(tmp_path: Path) -> None:
    file = write(tmp_path / "a.py", "one")
    first = StandardLibrary(tmp_path).identity()
    os.utime(file, (0, 0))
    assert StandardLibrary(tmp_path).identity() == first
    write(file, "two")
    second = StandardLibrary(tmp_path).identity()
    file.rename(tmp_path / "b.py")
    assert len({first, second, StandardLibrary(tmp_path).identity()}) == 3


def test_python_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"training\.dataset = 'stdlib'.*no \.py files"):
        StandardLibrary(tmp_path)


# Text


def test_text_folder_is_read_in_the_order_of_paths_without_hidden_files(tmp_path: Path) -> None:
    for name in ["b.txt", "a/z.txt", "a.txt", ".hidden", ".cache/lock"]:
        write(tmp_path / name, name)
    assert list(TextFiles(str(tmp_path))) == ["a.txt", "a/z.txt", "b.txt"]


def test_text_is_read_as_it_is(tmp_path: Path) -> None:
    text = " a\r\nb\0\t\u2581 \n"
    assert list(TextFiles(str(write(tmp_path / "a", text)))) == [text]


def test_text_takes_a_glob_and_gzip_and_skips_what_is_not_utf8(tmp_path: Path) -> None:
    write(tmp_path / "one.txt", "one")
    write(tmp_path / "two.txt.gz", gzip.compress(b"two"))
    write(tmp_path / "three.bin", "three")
    write(tmp_path / "latin.txt", b"\xff")
    documents = TextFiles(f"{tmp_path}/*.txt*")
    assert list(documents) == list(documents) == ["one", "two"]
    assert documents.skipped == {"not_utf8": 1}


def test_a_file_whose_name_looks_like_a_glob_is_found(tmp_path: Path) -> None:
    assert list(TextFiles(str(write(tmp_path / "a[1].txt", "x")))) == ["x"]


def test_cut_gzip_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress(os.urandom(1000))
    for name, content in {"cut.gz": packed[:-300], "not.gz": b"plain"}.items():
        with pytest.raises(ValueError, match=rf"training\.dataset_path.*{name} cannot be read"):
            list(TextFiles(str(write(tmp_path / name, content))))


@pytest.mark.parametrize("documents", [TextFiles, JsonLines])
@pytest.mark.parametrize("path", ["absent", "absent/*.txt", "empty"])
def test_a_path_without_files_is_refused(documents: type, path: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"training\.dataset_path = .*Rule: .*Way out: "):
        documents(str(tmp_path / path))


def test_identity_follows_the_files(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "one")
    identities = {TextFiles(str(tmp_path)).identity()}
    os.utime(file, ns=(0, 1))
    identities.add(TextFiles(str(tmp_path)).identity())
    write(tmp_path / "b.txt", "two")
    identities.add(TextFiles(str(tmp_path)).identity())
    assert len(identities) == 3


# Jsonl


def test_jsonl_gives_a_document_a_line(tmp_path: Path) -> None:
    write(tmp_path / "b.json.gz", gzip.compress(b'{"text": "three", "url": "u"}\n'))
    write(tmp_path / "a.jsonl", '\ufeff{"text": "one\\n"}\n\n  \r\n{"text": "two\u2028"}')
    write(tmp_path / "readme.md", "not data")
    assert list(JsonLines(str(tmp_path))) == ["one\n", "two\u2028", "three"]


BAD_LINES = {
    b"{'text': 1}": "not JSON",
    b'"text"': "not a JSON object but str",
    b'{"url": "u", "body": "b"}': "no key 'text'; the keys there are 'url', 'body'",
    b'{"text": null}': "not a string but NoneType",
    b'{"text": "\xff"}': "not UTF-8",
    rb'{"text": "\ud800"}': "not valid Unicode",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_line_is_refused_by_file_and_number(line: bytes, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"training\.dataset_path.*a\.jsonl, line 2: .*{BAD_LINES[line]}"):
        list(JsonLines(str(file)))


# Names


def test_datasets_are_found_by_name(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", json.dumps({"text": "one"}))
    assert list(open_documents("jsonl", str(file))) == ["one"]
    assert list(open_documents("text", str(file))) == ['{"text": "one"}']
    assert isinstance(open_documents("stdlib", ""), StandardLibrary)
