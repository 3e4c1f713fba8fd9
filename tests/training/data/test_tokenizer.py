"""Tokenizers give text back, are the same by content, and refuse what they are not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.core.errors import DataError
from echelon.training.data.tokenizer import (
    END_OF_DOCUMENT,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    require_same_tokenizer,
    train_tokenizer,
    trained_vocabulary,
)

TEXTS = ["def add(a, b):\n    return a + b\n" * 20, "\u00e9t\u00e9 \U0001f600\n\n\tend\r\n"]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    """Return a small byte-pair tokenizer."""
    return train_tokenizer("bpe-300", iter(TEXTS))


@given(st.text())
def test_bytes_give_any_text_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, 256]) == text
    assert tokenizer.encode_chunks([text.encode()])[0].tolist() == ids == list(text.encode())


@given(st.text())
def test_byte_pairs_give_any_text_back(text: str) -> None:
    tokenizer = train_tokenizer("bpe-300", iter(TEXTS))
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, tokenizer.description.end_of_document]) == text
    assert tokenizer.encode_chunks([text.encode()])[0].tolist() == ids


def test_the_byte_tokenizer_has_257_ids() -> None:
    description = load_tokenizer("bytes").description
    assert (description.vocabulary, description.end_of_document) == (257, 256)
    assert description.token_dtype == "uint16"


def test_byte_pairs_are_shorter_than_bytes(trained: Tokenizer) -> None:
    assert trained.description.name == "bpe-300"
    assert trained.description.vocabulary <= 300
    assert len(trained.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_text_that_spells_the_end_of_a_document_is_text(trained: Tokenizer) -> None:
    ids = trained.encode(f"a {END_OF_DOCUMENT} b")
    assert trained.description.end_of_document not in ids
    assert trained.decode(ids) == f"a {END_OF_DOCUMENT} b"


def test_training_is_the_same_in_another_process(trained: Tokenizer) -> None:
    code = (
        "import json, sys; from echelon.training.data.tokenizer import train_tokenizer as t;"
        "print(t('bpe-300', iter(json.loads(sys.argv[1]))).description.hash)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(TEXTS)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == trained.description.hash


def test_a_stored_tokenizer_is_the_same_by_content(trained: Tokenizer, tmp_path: Path) -> None:
    text = trained.to_json()
    assert text is not None
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    for name in (str(tmp_path), str(tmp_path / "tokenizer.json")):
        loaded = load_tokenizer(name)
        require_same_tokenizer(loaded.description, trained.description, expected_by="the test")
        assert loaded.encode(TEXTS[1]) == trained.encode(TEXTS[1])
        assert loaded.description.end_of_document == trained.description.end_of_document


def test_a_tokenizer_of_others_ends_documents_with_its_own_token(tmp_path: Path) -> None:
    path = _tokenizer_file(tmp_path, {"a": 0, "b": 1, "</s>": 9})
    description = load_tokenizer(str(path)).description
    assert description.end_of_document == 9
    assert description.vocabulary == 10


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    path = _tokenizer_file(tmp_path, {"a": 0, "<eos>": 70_000})
    loaded = load_tokenizer(str(path))
    assert loaded.description.token_dtype == "uint32"
    assert loaded.encode_chunks([b"a"])[0].dtype == np.uint32


def _tokenizer_file(folder: Path, vocabulary: dict[str, int]) -> Path:
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return path


def test_another_tokenizer_is_refused(trained: Tokenizer) -> None:
    with pytest.raises(DataError) as raised:
        require_same_tokenizer(
            ByteTokenizer().description, trained.description, expected_by="checkpoint step-000010"
        )
    assert raised.value.rules == ("data-tokenizer-same",)
    assert "checkpoint step-000010" in str(raised.value)
    assert trained.description.hash[:12] in str(raised.value)


@pytest.mark.parametrize("name", ["bpe4096", "byte", "no/such/tokenizer.json", "bpe-"])
def test_an_unknown_tokenizer_is_refused(name: str) -> None:
    with pytest.raises(DataError) as raised:
        load_tokenizer(name)
    assert raised.value.rules == ("tokenizer-known",)


@pytest.mark.parametrize("name", ["bpe-0", "bpe-256", "bpe-1000001"])
def test_a_vocabulary_out_of_range_is_refused(name: str) -> None:
    with pytest.raises(DataError) as raised:
        trained_vocabulary(name)
    assert raised.value.rules == ("tokenizer-known",)


@pytest.mark.parametrize("content", ["{", '{"a": 1}', ""])
def test_what_is_no_tokenizer_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError) as raised:
        load_tokenizer(str(tmp_path))
    assert raised.value.rules == ("tokenizer-file",)


def test_a_tokenizer_without_an_end_of_document_is_refused(tmp_path: Path) -> None:
    path = _tokenizer_file(tmp_path, {"a": 0, "b": 1})
    with pytest.raises(DataError) as raised:
        load_tokenizer(str(path))
    assert raised.value.rules == ("tokenizer-file",)
    assert "<|endoftext|>" in raised.value.problems[0].suggestions
