from __future__ import annotations

import io
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from trainer.data.documents import Split, split_documents
from trainer.data.sentencepiece_tokenizer import SentencePieceTokenizer, train_sentencepiece
from trainer.data.standard_library import StandardLibrary
from trainer.data.tokenizer import Tokenizer, load_tokenizer

AWKWARD_TEXTS = [
    "",
    " ",
    "  ",
    " a ",
    "\n",
    "\r\n",
    "\t\tx = 1\t\n\n\n",
    "def f():\r\n    return 0  \r\n",
    "\0",
    "a\0b\0",
    "\u2581",
    "\u2581\u2581 a\u2581b \u2581",
    "\u0301",
    "e\u0301 \u0301",
    "<0x41>",
    "<s>",
    "</s> <unk>",
    "\ufeffx",
    "\ufffd \ufffe",
    "\u2047",
    "\u00a0\u3000\u2028",
    "\U0010ffff\U0001f600",
    "\x7f\x80",
]
ALPHABETS = [
    [chr(i) for i in range(128)],
    list(" \t\r\n\0\u2581<>/s0x41A"),
    [chr(i) for i in range(0x3000) if not 0xD800 <= i < 0xE000],
    ["\u2581", " ", "\U0001f600", "\u0301", "self", "    ", "\n"],
]


def random_texts(count: int) -> Iterator[str]:
    source = random.Random(0)
    for number in range(count):
        alphabet = ALPHABETS[number % len(ALPHABETS)]
        yield "".join(source.choices(alphabet, k=source.randrange(1, 40)))
        anything = (source.randrange(0x110000) for _ in range(20))
        yield "".join(chr(i) for i in anything if not 0xD800 <= i < 0xE000)


@pytest.fixture(scope="module")
def corpus() -> dict[Split, list[str]]:
    parts: dict[Split, list[str]] = {split: [] for split in Split}
    for split, text in split_documents(StandardLibrary()):
        parts[split].append(text)
    return parts


@pytest.fixture(scope="module")
def trained(corpus: dict[Split, list[str]]) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(train_sentencepiece(corpus[Split.TRAINING]))


@pytest.fixture(params=["bytes", "trained"])
def exact(request: pytest.FixtureRequest) -> Tokenizer:
    return load_tokenizer("bytes") if request.param == "bytes" else request.getfixturevalue("trained")


def test_any_text_comes_back_exactly(exact: Tokenizer) -> None:
    for text in [*AWKWARD_TEXTS, *random_texts(3000)]:
        ids = exact.encode(text)
        assert exact.decode(ids) == text
        assert all(0 <= i < exact.vocab_size for i in ids)
        assert not {exact.bos_id, exact.eos_id} & set(ids)


def test_bos_eos_and_padding_decode_to_nothing(exact: Tokenizer) -> None:
    ids = [exact.bos_id, *exact.encode(" a b"), exact.eos_id, exact.vocab_size, exact.vocab_size + 500]
    assert exact.decode(ids) == " a b"


def test_half_a_character_decodes_to_a_replacement(exact: Tokenizer) -> None:
    ids = exact.encode("\u2581")
    assert len(ids) == 3
    assert "\ufffd" in exact.decode(ids[:2])


def test_byte_tokenizer_has_258_ids() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (258, 256, 257)
    assert tokenizer.encode("aé") == [97, 195, 169]


def test_trained_tokenizer_packs_three_bytes_into_a_token(
    trained: SentencePieceTokenizer, corpus: dict[Split, list[str]]
) -> None:
    texts = corpus[Split.HELD_OUT]
    assert trained.vocab_size == 4096
    assert sum(len(text.encode()) for text in texts) >= 3 * sum(len(trained.encode(text)) for text in texts)


def test_indentation_is_one_token(trained: SentencePieceTokenizer) -> None:
    assert [len(trained.encode(" " * width)) for width in (4, 8, 12)] == [1, 1, 1]


def test_training_is_quiet_and_the_same_in_another_process() -> None:
    program = (
        "import hashlib, sys\n"
        "from trainer.data.sentencepiece_tokenizer import train_sentencepiece\n"
        "from trainer.data.standard_library import StandardLibrary\n"
        "model = train_sentencepiece(list(StandardLibrary())[:100])\n"
        "print(hashlib.sha256(model).hexdigest())\n"
    )
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(2)]
    assert [run.stderr for run in runs] == ["", ""]
    assert runs[0].stdout == runs[1].stdout != ""


def test_saved_tokenizer_loads_as_the_same(exact: Tokenizer, tmp_path: Path) -> None:
    exact.save(tmp_path / "tokenizer")
    assert_same(load_tokenizer(str(tmp_path / "tokenizer")), exact)


def assert_same(loaded: Tokenizer, saved: Tokenizer) -> None:
    assert type(loaded) is type(saved)
    assert loaded.fingerprint == saved.fingerprint
    assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id) == (saved.vocab_size, saved.bos_id, saved.eos_id)
    assert loaded.encode("Hello <s> world\n") == saved.encode("Hello <s> world\n")


def test_fingerprints_of_different_tokenizers_differ(
    trained: SentencePieceTokenizer, corpus: dict[Split, list[str]]
) -> None:
    other = SentencePieceTokenizer(train_sentencepiece(corpus[Split.HELD_OUT]))
    assert len({trained.fingerprint, other.fingerprint, load_tokenizer("bytes").fingerprint}) == 3


def test_foreign_model_with_dummy_prefix_keeps_its_ways(corpus: dict[Split, list[str]], tmp_path: Path) -> None:
    # Llama 2's model puts a space before each text; after a cut at U+2581 it would put one in the middle.
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus[Split.HELD_OUT][:20]),
        model_writer=file,
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(file.getvalue())
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.model"))
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"
    assert tokenizer.decode(tokenizer.encode("a\u2581b")) == "a b"


BAD_FILES = {
    "empty.model": (b"", "not a SentencePiece model"),
    "garbage.model": (bytes(range(256)) * 8, "not a SentencePiece model"),
    "text.model": (b"version https://git-lfs.github.com/spec/v1\n", "not a SentencePiece model"),
    "llama3.model": (b"IQ== 0\nIg== 1\n", "tiktoken.*tokenizer.json"),
    "bad.json": (b"{}", "tokenizer.json"),
    "latin.json": (b"\xff", "utf-8"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_refused_with_setting_and_way_out(name: str, tmp_path: Path) -> None:
    content, problem = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"(?s)model\.tokenizer_path = .*{name}.*{problem}.*tokenizer_path bytes"):
        load_tokenizer(str(tmp_path / name))


def test_cut_model_is_refused(trained: SentencePieceTokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path)
    model = tmp_path / "tokenizer.model"
    model.write_bytes(model.read_bytes()[:-7])
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        load_tokenizer(str(tmp_path))


def test_missing_file_and_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such file.*hf download meta-llama/Llama-3.1-8B"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"holds no tokenizer.json and 0 files"):
        load_tokenizer(str(tmp_path))


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|begin_of_text|>", "<|end_of_text|>"]
    )
    tokenizer.train_from_iterator(["hello world"] * 3, trainer)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    folder = tmp_path / "hf"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_hf_tokenizer_returns_any_text_and_is_not_truncated(hf_folder: Path) -> None:
    tokenizer = load_tokenizer(str(hf_folder))
    for text in ["hello", "hello world, " * 50, *AWKWARD_TEXTS]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_hf_tokenizer_does_not_pad(hf_folder: Path) -> None:
    assert load_tokenizer(str(hf_folder)).encode("") == []


def test_hf_special_tokens_in_a_text_stay_text(hf_folder: Path) -> None:
    tokenizer = load_tokenizer(str(hf_folder))
    ids = tokenizer.encode("a<|end_of_text|>b")
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
    assert tokenizer.decode(ids) == "a<|end_of_text|>b"
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id, 10_000]) == "a<|end_of_text|>b"


def test_hf_config_names_bos_and_eos(hf_folder: Path) -> None:
    guessed = load_tokenizer(str(hf_folder))
    config = {"bos_token": None, "eos_token": {"content": "<|end_of_text|>"}}
    (hf_folder / "tokenizer_config.json").write_text(json.dumps(config))
    stated = load_tokenizer(str(hf_folder / "tokenizer.json"))
    assert (guessed.bos_id, guessed.eos_id) == (0, 1)
    assert (stated.bos_id, stated.eos_id) == (1, 1)
    assert guessed.fingerprint != stated.fingerprint


def test_hf_config_with_an_unknown_token_is_refused(hf_folder: Path) -> None:
    (hf_folder / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    with pytest.raises(ValueError, match="<stop>"):
        load_tokenizer(str(hf_folder))


@pytest.mark.parametrize("config", ["[]", "{"])
def test_hf_config_that_is_no_object_is_refused(config: str, hf_folder: Path) -> None:
    (hf_folder / "tokenizer_config.json").write_text(config)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json beside it is not"):
        load_tokenizer(str(hf_folder))


def test_saved_hf_tokenizer_loads_as_the_same(hf_folder: Path, tmp_path: Path) -> None:
    saved = load_tokenizer(str(hf_folder))
    saved.save(tmp_path / "copy")
    shutil.rmtree(hf_folder)
    assert_same(load_tokenizer(str(tmp_path / "copy")), saved)


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"pip install -e '\.\[hf\]'"):
        load_tokenizer(str(tmp_path))
