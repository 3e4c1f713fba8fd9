"""Tokenizers that leave: transformers makes the same ids of any text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from echelon.training.data.tokenizer import ByteTokenizer, Tokenizer, train_tokenizer
from echelon.training.data.tokenizer_files import tokenizer_files

TEXTS = (
    "plain words\n",
    "h\u00e9llo \u4e16\u754c \U0001f600",
    "\ttab and  two spaces ",
    "",
    "\x00\x7f",
)


@pytest.fixture(scope="module", params=["bytes", "bpe-300"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    return train_tokenizer("bpe-300", iter(["some words that come again and again " * 20]))


def test_the_same_ids_and_the_same_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name, text in tokenizer_files(tokenizer, 128).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    # transformers asks the folder which model it is for.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert theirs(text, add_special_tokens=False).input_ids == ids
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == tokenizer.description.end_of_document
    assert len(theirs) == tokenizer.description.vocabulary
    assert theirs.model_max_length == 128
