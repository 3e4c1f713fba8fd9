"""Each format is read, and what is wrong in a source is named by file, line and byte."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from pyarrow import parquet

from echelon.core.errors import DataError, EnvironmentProblem
from echelon.training.data.prepare import PrepareOptions
from echelon.training.data.records import read_chunks
from echelon.training.data.sources import find_files

DOCUMENTS = ["one\r\ntwo\n", "\u00e9t\u00e9 \U0001f600", "", "three"]


def _read(source: Path, **options: Any) -> list[str]:
    settings = PrepareOptions(**options)
    found = find_files([source], format=settings.format, split=settings.split)
    texts: list[str] = []
    held = b""
    for file in found.files:
        for piece in read_chunks(file, field=settings.field):
            held += piece.text
            if piece.last:
                texts.append(held.decode())
                held = b""
    assert held == b""
    return texts


def _table(field: str = "text", documents: list[str] | None = None) -> arrow.Table:
    texts = DOCUMENTS if documents is None else documents
    return arrow.table({"id": list(range(len(texts))), field: texts})


def _write_jsonl(path: Path, field: str = "text") -> None:
    lines = [json.dumps({"id": number, field: text}) for number, text in enumerate(DOCUMENTS)]
    path.write_text("\n\n".join(lines))


def _write_stream(path: Path, table: arrow.Table) -> None:
    with arrow.OSFile(str(path), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def _write_arrow_file(path: Path, table: arrow.Table) -> None:
    with arrow.OSFile(str(path), "wb") as sink, arrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def _write_zipped(path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in DOCUMENTS]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))


WRITERS: dict[str, Callable[[Path], None]] = {
    "corpus.jsonl": _write_jsonl,
    "corpus.ndjson": _write_jsonl,
    "corpus.jsonl.gz": _write_zipped,
    "corpus.parquet": lambda path: parquet.write_table(_table(), path, row_group_size=2),
    "stream.arrow": lambda path: _write_stream(path, _table()),
    "file.arrow": lambda path: _write_arrow_file(path, _table()),
}


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_records_are_documents(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    assert _read(tmp_path / name) == DOCUMENTS


@pytest.mark.parametrize(
    "kind", [arrow.large_string(), arrow.dictionary(arrow.int8(), arrow.utf8())]
)
def test_all_kinds_of_text_columns_are_read(tmp_path: Path, kind: arrow.DataType) -> None:
    table = arrow.table({"text": arrow.array(["a", "b"]).cast(kind)})
    _write_stream(tmp_path / "data.arrow", table)
    assert _read(tmp_path / "data.arrow") == ["a", "b"]


def test_a_zipped_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(b"zipped\r\n"))
    assert _read(tmp_path / "text.txt.gz") == ["zipped\r\n"]


def test_a_text_without_newlines_is_one_document(tmp_path: Path) -> None:
    text = "\u00e9" * 2_000_000
    (tmp_path / "text.txt").write_bytes(text.encode())
    assert _read(tmp_path / "text.txt") == [text]


def test_a_stated_format_wins_over_the_name(tmp_path: Path) -> None:
    (tmp_path / "corpus.dump").write_text("text")
    assert _read(tmp_path / "corpus.dump", format="text") == ["text"]
    _write_jsonl(tmp_path / "corpus.txt")
    assert _read(tmp_path / "corpus.txt", format="jsonl") == DOCUMENTS


def _refused(source: Path, **options: Any) -> DataError:
    with pytest.raises(DataError) as raised:
        _read(source, **options)
    return raised.value


def test_a_missing_field_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "one"}\n\n{"content": "two"}\n')
    error = _refused(path)
    assert error.rules == ("data-field",)
    assert f"{path}:3 has no field 'text'" in str(error)
    assert error.problems[0].suggestions == ("--field content",)


@pytest.mark.parametrize("value", ["null", "3", '["a"]', '{"a": 1}'])
def test_a_field_that_is_no_string_is_refused(tmp_path: Path, value: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(f'{{"text": {value}}}')
    assert _refused(path).rules == ("data-field",)


@pytest.mark.parametrize("name", ["corpus.parquet", "stream.arrow", "file.arrow"])
def test_a_missing_column_names_those_there(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    error = _refused(tmp_path / name, field="body")
    assert error.rules == ("data-field",)
    assert error.problems[0].suggestions == ("--field id", "--field text")
    error = _refused(tmp_path / name, field="id")
    assert error.rules == ("data-field",)
    assert "holds int64, not strings" in str(error)


def test_a_null_in_a_column_names_the_row(tmp_path: Path) -> None:
    table = arrow.table({"text": ["a", None]})
    parquet.write_table(table, tmp_path / "a.parquet")
    error = _refused(tmp_path / "a.parquet")
    assert error.rules == ("data-field",)
    assert "a.parquet, row 1: field 'text' is null" in str(error)


@pytest.mark.parametrize("line", ['{"text": "on', "[1]", '"text"', "not json"])
def test_a_line_that_is_no_object_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(f'{{"text": "one"}}\n{line}\n')
    error = _refused(path)
    assert error.rules == ("data-record",)
    assert f"{path}:2" in str(error)


def test_a_byte_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"a line\n" * 300_000 + "caf\u00e9".encode("latin1"))
    error = _refused(path)
    assert error.rules == ("data-utf8",)
    assert "byte 2100003: 0xe9 is not UTF-8" in str(error)

    path = tmp_path / "latin1.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": "caf\xe9"}\n')
    error = _refused(path)
    assert error.rules == ("data-utf8",)
    assert f"{path}:2, byte 13 of the line" in str(error)


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "ab\\ud800"}')
    error = _refused(path)
    assert error.rules == ("data-utf8",)
    assert "character 2" in str(error)


@pytest.mark.parametrize("name", ["corpus.jsonl.gz", "corpus.parquet", "stream.arrow"])
def test_a_file_that_breaks_off_is_refused(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) * 2 // 3])
    error = _refused(tmp_path / name)
    assert error.rules == ("data-source-unreadable",)
    assert name in str(error)


@pytest.mark.parametrize("name", ["text.txt.gz", "a.parquet", "a.arrow"])
def test_a_file_of_other_content_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"this is plain text and nothing else" * 4)
    assert _refused(tmp_path / name).rules == ("data-source-unreadable",)


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS["corpus.parquet"](tmp_path / "corpus.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EnvironmentProblem) as raised:
        _read(tmp_path / "corpus.parquet")
    assert raised.value.rules == ("package-installed",)
