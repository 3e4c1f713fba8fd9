# SPDX-License-Identifier: Apache-2.0
"""Read the documents of one file as pieces of UTF-8 text, never more than a few MiB at a time.

A text file is one document; a line of jsonl and a row of parquet or arrow is one. A long text comes
in several pieces, cut after a newline, so that memory stays bounded; the cut is at the same byte
every time. Newlines are kept as they are in the file.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

from echelon.core.errors import DataError
from echelon.core.optional import optional_package
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.rulebook.data import DATA_FIELD, DATA_RECORD, DATA_UTF8
from echelon.core.serialize import decode_json
from echelon.training.data.sources import SourceFile, unreadable
from echelon.training.data.urls import open_url


@dataclass(frozen=True, slots=True)
class DocumentChunk:
    """Hold a part of a document, valid UTF-8; `last` ends the document."""

    text: bytes
    last: bool


def read_chunks(
    file: SourceFile, *, field: str, pieces: PieceSizes = TRAINING_PIECES
) -> Iterator[DocumentChunk]:
    """Yield the documents of `file`; empty ones come as one empty last piece."""
    try:
        match file.format:
            case "text":
                yield from _read_text(file, pieces.text_bytes)
            case "jsonl":
                yield from _read_jsonl(file, field)
            case "parquet":
                yield from _read_parquet(file, field, pieces.record_rows)
            case "arrow":
                yield from _read_arrow(file, field, pieces.record_rows)
            case "chat":
                raise AssertionError("chats are read as records")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(unreadable(file.place, error)) from error


def read_records(file: SourceFile) -> Iterator[tuple[dict[str, object], str]]:
    """Yield each record of a file of JSON lines, and its place: FILE:LINE."""
    try:
        with _open(file) as stream:
            for number, line in enumerate(stream, start=1):
                place = f"{file.place}:{number}"
                if line.strip():
                    yield _parse(line, place), place
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(unreadable(file.place, error)) from error


@contextmanager
def _open(file: SourceFile) -> Generator[IO[bytes]]:
    with ExitStack() as opened:
        plain: IO[bytes] = opened.enter_context(
            open_url(file.url) if file.url else file.path.open("rb")
        )
        if file.path.suffix.lower() == ".gz":
            yield cast("IO[bytes]", opened.enter_context(gzip.GzipFile(fileobj=plain)))
        else:
            yield plain


def _read_text(file: SourceFile, most: int) -> Iterator[DocumentChunk]:
    offset = 0
    held = b""
    with _open(file) as stream:
        while block := stream.read(most):
            # A newline is never inside a UTF-8 sequence, so each piece decodes by itself.
            block += stream.readline()
            if held:
                yield DocumentChunk(held, last=False)
            try:
                block.decode("utf-8")
            except UnicodeDecodeError as error:
                place = f"{file.place}, byte {offset + error.start}"
                raise DataError(_not_utf8(place, error)) from error
            offset += len(block)
            held = block
    yield DocumentChunk(held, last=True)


def _not_utf8(place: str, error: UnicodeDecodeError) -> Any:
    wrong = error.object[error.start]
    return DATA_UTF8.problem(f"{place}: 0x{wrong:02x} is not UTF-8 ({error.reason})")


def _read_jsonl(file: SourceFile, field: str) -> Iterator[DocumentChunk]:
    for record, place in read_records(file):
        yield _document(record, field, place)


def _parse(line: bytes, place: str) -> dict[str, object]:
    try:
        record = decode_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(_not_utf8(f"{place}, byte {error.start} of the line", error)) from error
    except ValueError as error:
        raise DataError(
            DATA_RECORD.problem(f"{place} is no JSON: {error}", suggestions=("--format text",))
        ) from error
    if not isinstance(record, dict):
        raise DataError(
            DATA_RECORD.problem(f"{place} is a JSON {type(record).__name__}, not an object")
        )
    return cast("dict[str, object]", record)


def _document(record: dict[str, object], field: str, place: str) -> DocumentChunk:
    if field not in record:
        raise DataError(
            DATA_FIELD.problem(
                f"{place} has no field {field!r}",
                suggestions=[f"--field {name}" for name in record],
            )
        )
    return _text_piece(record[field], field, place)


def _text_piece(value: object, field: str, place: str) -> DocumentChunk:
    if not isinstance(value, str):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise DataError(DATA_FIELD.problem(f"{place}: field {field!r} is {kind}, not a string"))
    try:
        return DocumentChunk(value.encode("utf-8"), last=True)
    except UnicodeEncodeError as error:
        raise DataError(
            DATA_UTF8.problem(
                f"{place}: character {error.start} of field {field!r} is half of a surrogate pair"
            )
        ) from error


def _read_parquet(file: SourceFile, field: str, most: int) -> Iterator[DocumentChunk]:
    arrow = _pyarrow(file)
    parquet = optional_package("pyarrow.parquet", extra="data", purpose=f"reading {file.place}")
    try:
        with _open(file) as stream, parquet.ParquetFile(stream) as table:
            _check_column(table.schema_arrow, field, file, arrow)
            batches = table.iter_batches(batch_size=most, columns=[field])
            yield from _rows(batches, field, file, most)
    except (arrow.ArrowException, ValueError) as error:
        raise DataError(unreadable(file.place, error)) from error


def _read_arrow(file: SourceFile, field: str, most: int) -> Iterator[DocumentChunk]:
    """Read the stream format, which the datasets library writes, or else the file format."""
    arrow = _pyarrow(file)
    try:
        with _open(file) if file.url else arrow.memory_map(str(file.path), "rb") as source:
            try:
                table = arrow.ipc.open_stream(source)
                batches = iter(table)
            except arrow.ArrowInvalid:
                source.seek(0)
                table = arrow.ipc.open_file(source)
                batches = (table.get_batch(i) for i in range(table.num_record_batches))
            _check_column(table.schema, field, file, arrow)
            yield from _rows(batches, field, file, most)
    except (arrow.ArrowException, ValueError) as error:
        raise DataError(unreadable(file.place, error)) from error


def _rows(
    batches: Iterator[Any], field: str, file: SourceFile, most: int
) -> Iterator[DocumentChunk]:
    row = 0
    for batch in batches:
        column = batch.column(batch.schema.get_field_index(field))
        for start in range(0, len(column), most):
            for value in column.slice(start, most).to_pylist():
                yield _text_piece(value, field, f"{file.place}, row {row}")
                row += 1


def _check_column(schema: Any, field: str, file: SourceFile, arrow: Any) -> None:
    if field not in schema.names:
        raise DataError(
            DATA_FIELD.problem(
                f"{file.place} has no column {field!r}",
                suggestions=[f"--field {name}" for name in schema.names],
            )
        )
    kind = schema.field(field).type
    is_text = arrow.types.is_string(kind) or arrow.types.is_large_string(kind)
    if not is_text and not arrow.types.is_string_view(kind) and not arrow.types.is_dictionary(kind):
        raise DataError(
            DATA_FIELD.problem(f"{file.place}: column {field!r} holds {kind}, not strings")
        )


def _pyarrow(file: SourceFile) -> Any:
    return optional_package("pyarrow", extra="data", purpose=f"reading {file.place}")
