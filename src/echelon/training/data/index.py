"""The index of prepared data: every file with its size and hash, and a hash over all of it.

tokens/  shard-00000.bin ...   token ids one after the other, little-endian uint16 or uint32
         documents.bin         where each document ends, in tokens from the start, uint64
         tokenizer.json        the tokenizer, unless it is the byte tokenizer
         index.json            this; written last
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from echelon.core.disk import is_plain_name
from echelon.core.errors import DataError, Problem
from echelon.core.rulebook.data import DATA_INDEX, DATA_PREPARED, DATA_SCHEMA, DATA_SHARD_SIZE
from echelon.core.serialize import decode_json, from_json, to_json
from echelon.training.data.tokenizer import TOKENIZER_FILE_NAME, TokenizerDescription

INDEX_SCHEMA = 1  # of the written JSON
INDEX_FILE_NAME = "index.json"
DOCUMENTS_FILE_NAME = "documents.bin"
TOKEN_BYTES = {"uint16": 2, "uint32": 4}
DOCUMENT_BYTES = 8
DATA_FOLDER = "data"
"""Where data is prepared below the folder of all runs: no run can have this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFileEntry:
    """Name one file, how many entries (tokens or documents) it holds, and its sha256."""

    file: str
    count: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetIndex:
    """Describe prepared data; `hash` covers every token, every boundary and the tokenizer."""

    dtype: Literal["uint16", "uint32"]
    num_tokens: int
    max_token: int
    tokenizer: TokenizerDescription
    shards: tuple[DataFileEntry, ...]
    documents: DataFileEntry
    hash: str = ""
    schema: int = INDEX_SCHEMA

    def with_hash(self) -> DatasetIndex:
        """Return the index with the hash of its own content filled in."""
        return replace(self, hash=self.content_hash())

    def content_hash(self) -> str:
        """Return the sha256 of all entries but `hash`, hence of the content of all files."""
        entries = to_json(replace(self, hash=""))
        text = json.dumps(entries, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every binary file."""
        sizes = {entry.file: entry.count * TOKEN_BYTES[self.dtype] for entry in self.shards}
        return sizes | {self.documents.file: self.documents.count * DOCUMENT_BYTES}

    def to_text(self) -> str:
        """Return the text of index.json."""
        return json.dumps(to_json(self), indent=2) + "\n"


def read_index(folder: Path) -> DatasetIndex:
    """Return the index of the prepared data in `folder`; DataError where it is none or damaged."""
    path = folder / INDEX_FILE_NAME
    try:
        data = decode_json(path.read_bytes())
    except OSError as error:
        raise DataError(_not_prepared(folder)) from error
    except ValueError as error:
        raise DataError(DATA_INDEX.problem(f"{path} is no JSON: {error}")) from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if isinstance(data, dict) and schema != INDEX_SCHEMA:
        raise DataError(
            DATA_SCHEMA.problem(
                f"{path} has schema {schema!r}; this version reads schema {INDEX_SCHEMA}"
            )
        )
    try:
        index = from_json(DatasetIndex, data, where=str(path))
    except ValueError as error:
        raise DataError(DATA_INDEX.problem(str(error))) from error
    names = [index.documents.file, *(shard.file for shard in index.shards)]
    if outside := [name for name in names if not is_plain_name(name)]:
        named = ", ".join(outside[:4])
        raise DataError(DATA_INDEX.problem(f"{path} names files outside of its folder: {named}"))
    if index.hash != index.content_hash():
        raise DataError(
            DATA_INDEX.problem(
                f"{path} states hash {index.hash[:12]}, its entries have "
                f"{index.content_hash()[:12]}: it was edited"
            )
        )
    return index


def size_problems(folder: Path, index: DatasetIndex) -> list[Problem]:
    """Return a problem for each file that is missing or has another size than stated."""
    problems: list[Problem] = []
    for name, expected in index.sizes().items():
        path = folder / name
        if not path.is_file():
            problems.append(DATA_SHARD_SIZE.problem(f"{path} is missing ({expected} bytes)"))
        elif (size := path.stat().st_size) != expected:
            change = "truncated" if size < expected else "too long"
            problems.append(
                DATA_SHARD_SIZE.problem(
                    f"{path} is {change}: {size} bytes, the index states {expected}"
                )
            )
    if index.tokenizer.name != "bytes" and not (folder / TOKENIZER_FILE_NAME).is_file():
        problems.append(DATA_SHARD_SIZE.problem(f"{folder / TOKENIZER_FILE_NAME} is missing"))
    return problems


def _not_prepared(folder: Path) -> Problem:
    if not folder.exists():
        there = "it does not exist"
    elif not folder.is_dir():
        there = "it is a file"
    else:
        names = sorted(path.name for path in folder.iterdir())
        there = f"there is: {', '.join(names[:6]) or 'nothing'}"
    return DATA_PREPARED.problem(f"{folder} has no {INDEX_FILE_NAME} ({there})")
