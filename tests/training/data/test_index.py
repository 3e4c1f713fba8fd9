"""index.json of prepared data: its hash covers all, and what is damaged is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echelon.core.errors import DataError
from echelon.training.data.index import (
    DataFileEntry,
    DatasetIndex,
    read_index,
    size_problems,
)
from echelon.training.data.tokenizer import ByteTokenizer


def index() -> DatasetIndex:
    return DatasetIndex(
        dtype="uint16",
        num_tokens=5,
        max_token=256,
        tokenizer=ByteTokenizer().description,
        shards=(DataFileEntry(file="shard-00000.bin", count=5, sha256="a"),),
        documents=DataFileEntry(file="documents.bin", count=2, sha256="b"),
    ).with_hash()


def write(folder: Path, text: str) -> None:
    (folder / "index.json").write_text(text, encoding="utf-8")


def test_an_index_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path, index().to_text())
    assert read_index(tmp_path) == index()
    assert index().sizes() == {"shard-00000.bin": 10, "documents.bin": 16}


def test_the_hash_covers_every_entry() -> None:
    changed = (
        replace(index(), num_tokens=6),
        replace(index(), documents=replace(index().documents, sha256="c")),
    )
    assert len({one.content_hash() for one in (index(), *changed)}) == 3
    assert index().content_hash() == index().hash


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ('"num_tokens": 5', '"num_tokens": 6', "data-index"),
        ('"schema": 1', '"schema": 3', "data-schema"),
        ("shard-00000.bin", "../shard.bin", "data-index"),
        ("{", "", "data-index"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, old: str, new: str, rule: str) -> None:
    write(tmp_path, index().to_text().replace(old, new, 1))
    with pytest.raises(DataError) as refused:
        read_index(tmp_path)
    assert refused.value.rules == (rule,)


def test_files_of_another_size_are_told(tmp_path: Path) -> None:
    (tmp_path / "shard-00000.bin").write_bytes(bytes(9))
    said = [problem.message for problem in size_problems(tmp_path, index())]
    assert "is truncated: 9 bytes, the index states 10" in said[0]
    assert "is missing (16 bytes)" in said[1]
