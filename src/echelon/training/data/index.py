# SPDX-License-Identifier: Apache-2.0
"""The index of prepared data: every file with its size and hash, and a hash over all of it.

tokens/  shard-00000.bin ...   token ids one after the other, little-endian uint16 or uint32
         documents.bin         where each document ends, in tokens from the start, uint64
         answers.bin           of chats: a bit a token, 1 for those of answers, lowest bit first
         tokenizer.json        the tokenizer, unless it is the byte tokenizer
         index.json            this; written last
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from echelon.config.files.new_file import free_name
from echelon.core.disk import is_plain_name
from echelon.core.errors import DataError, Problem
from echelon.core.rulebook.data import DATA_INDEX, DATA_PREPARED, DATA_SCHEMA, DATA_SHARD_SIZE
from echelon.core.serialize import decode_json, from_json, to_json
from echelon.training.data.tokenizer import TOKENIZER_FILE_NAME, TokenizerDescription

INDEX_SCHEMA = 1  # of the written JSON
ANSWERS_SCHEMA = 2  # of that of chats, which tells answers apart
INDEX_FILE_NAME = "index.json"
DOCUMENTS_FILE_NAME = "documents.bin"
ANSWERS_FILE_NAME = "answers.bin"
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
class AnswersEntry:
    """Name the file that says which tokens are of answers.

    `count` is the number of tokens it tells of, `num_answers` how many of them are of answers,
    `template` the sha256 of the chat template that wrote them.
    """

    file: str
    count: int
    sha256: str
    num_answers: int
    template: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetIndex:
    """Describe prepared data; `hash` covers every token, every boundary and the tokenizer."""

    dtype: Literal["uint16", "uint32"]
    """Integer type of a token."""
    num_tokens: int
    """Tokens of all shards."""
    max_token: int
    """The largest token id."""
    tokenizer: TokenizerDescription
    """The tokenizer that made the tokens."""
    shards: tuple[DataFileEntry, ...]
    """Files of tokens, in order."""
    documents: DataFileEntry
    """The file that says where documents end."""
    hash: str = ""
    """sha256 of all other entries."""
    schema: int = INDEX_SCHEMA
    """Of the written JSON: `ANSWERS_SCHEMA` where there are answers, else `INDEX_SCHEMA`."""
    answers: AnswersEntry | None = None
    """Which tokens are of answers; None where the data is no chats."""

    def with_hash(self) -> DatasetIndex:
        """Return the index with the hash of its own content filled in."""
        return replace(self, hash=self.content_hash())

    def content_hash(self) -> str:
        """Return the sha256 of all entries but `hash`, hence of the content of all files."""
        entries = replace(self, hash="").entries()
        text = json.dumps(entries, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every binary file."""
        sizes = {entry.file: entry.count * TOKEN_BYTES[self.dtype] for entry in self.shards}
        sizes[self.documents.file] = self.documents.count * DOCUMENT_BYTES
        if self.answers is not None:
            sizes[self.answers.file] = -(-self.answers.count // 8)
        return sizes

    def entries(self) -> dict[str, object]:
        """Return what index.json holds; of text it is what versions without answers wrote."""
        entries = cast("dict[str, object]", to_json(self))
        if self.answers is None:
            del entries["answers"]
        return entries

    def to_text(self) -> str:
        """Return the text of index.json."""
        return json.dumps(self.entries(), indent=2) + "\n"


def read_index(folder: Path) -> DatasetIndex:
    """Return the index of the prepared data in `folder`; DataError where it is none or damaged."""
    path = folder / INDEX_FILE_NAME
    try:
        data = decode_json(path.read_bytes())
    except OSError as error:
        raise DataError(_not_prepared(folder)) from error
    except ValueError as error:
        raise DataError(
            DATA_INDEX.problem(f"{path} is no JSON: {error}", suggestions=(_anew(folder),))
        ) from error
    schema = data.get("schema") if isinstance(data, dict) else None
    known = (INDEX_SCHEMA, ANSWERS_SCHEMA)
    if isinstance(data, dict) and schema not in known:
        raise DataError(
            DATA_SCHEMA.problem(
                f"{path} has schema {schema!r}; this version reads schema "
                f"{' and '.join(map(str, known))}"
            )
        )
    try:
        index = from_json(DatasetIndex, data, where=str(path))
    except ValueError as error:
        raise DataError(DATA_INDEX.problem(str(error), suggestions=(_anew(folder),))) from error
    names = [index.documents.file, *(shard.file for shard in index.shards)]
    if index.answers is not None:
        names.append(index.answers.file)
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
            problems.append(
                DATA_SHARD_SIZE.problem(
                    f"{path} is missing ({expected} bytes)", suggestions=(_anew(folder),)
                )
            )
        elif (size := path.stat().st_size) != expected:
            change = "truncated" if size < expected else "too long"
            problems.append(
                DATA_SHARD_SIZE.problem(
                    f"{path} is {change}: {size} bytes, the index states {expected}",
                    suggestions=(_anew(folder),),
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
    return DATA_PREPARED.problem(
        f"{folder} has no {INDEX_FILE_NAME} ({there})", suggestions=_prepared_near(folder)
    )


def _prepared_near(folder: Path) -> list[str]:
    """Return prepared data in or next to this folder or in a folder of runs, or a command."""
    places = (folder, folder.parent, folder.parent / "runs" / "data")
    found = sorted(
        {
            str(one.parent)
            for place in places
            if place.is_dir()
            for one in place.glob(f"*/{INDEX_FILE_NAME}")
            if not (one.parent / "state.json").is_file()  # a checkpoint
        }
    )
    return found[:6] or [f"echelon data prepare SOURCE --out {free_name(folder)}"]


def _anew(folder: Path) -> str:
    return f"echelon data prepare SOURCE --out {free_name(folder)}"
