# SPDX-License-Identifier: Apache-2.0
"""The data of a run, read from its records by other code: tokens, answers, documents, both parts.

Files are read by `pyarrow`, `gzip` and `json`, text is encoded by `tokenizers`, chats are rendered
by the templates of `transformers`; nothing of the trainer is used. A source is one text: its
documents one after the other, each followed by end-of-document, or chats as their template writes
them. Its last part is held out. The cut is at the nearest end of a document, unless that makes the
part less than half or more than twice as large as wanted. Prepared data are read from the files
that their index.json names.

The first `max_bytes` of a source are read. The token that ends a document, and the vocabulary of
bpe-N, come from the index of the trainer.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import re
import sysconfig
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from echelon.proof.independent.samples import ReadRow

_NO_LABEL = -100  # the label of a position that takes no part in the loss
_OTHER_FOLDERS = {
    *("__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data"),
    *("site-packages", "test", "tests"),
}
"""Folders of the standard library that are no part of the built-in corpus."""
_RECORDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_REASONING = ("reasoning_content", "thinking", "reasoning")

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceText:
    """The tokens of a source, or of its part [start, stop).

    `ends` are the numbers of tokens up to the end of each document. `answers` is true for each
    token of chats that is part of an answer; text has none.
    """

    tokens: Sequence[int]
    ends: Sequence[int]
    answers: Sequence[bool] | None
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the part."""
        return self.stop - self.start

    def num_samples(self, length: int) -> int:
        """Samples of the part: each token but the first is the label of one position."""
        return -(-(self.num_tokens - 1) // length)

    def documents(self) -> Iterator[int]:
        """Tokens of each document, as the part cuts it."""
        inside = self.ends[bisect_right(self.ends, self.start) : bisect_left(self.ends, self.stop)]
        yield from (last - first for first, last in pairwise([self.start, *inside, self.stop]))

    def split(self, fraction: float) -> tuple[SourceText, SourceText]:
        """The training part, and the part of about `fraction` that is held out."""
        wanted = round(self.num_tokens * fraction)
        place = self.stop - wanted
        right = bisect_left(self.ends, place)
        around = self.ends[max(right - 1, 0) : right + 1]
        nearest = min(around, key=lambda end: (abs(end - place), end))
        held_out = self.stop - nearest
        cut = nearest if wanted / 2 <= held_out <= 2 * wanted else place
        return replace(self, stop=cut), replace(self, start=cut)

    def row(self, sample: int, length: int, end: int, *, answers_only: bool) -> ReadRow:
        """A sample of the part; positions behind its end have `end` and no label."""
        first = self.start + sample * length
        last = min(first + length + 1, self.stop)
        tokens = [int(token) for token in self.tokens[first:last]]
        labels = tokens[1:]
        if answers_only:
            assert self.answers is not None, "chats have answers"
            counted = self.answers[first + 1 : last]
            pairs = zip(labels, counted, strict=True)
            labels = [label if counts else _NO_LABEL for label, counts in pairs]
        inputs = tokens[:length]
        inputs += [end] * (length - len(inputs))
        labels += [_NO_LABEL] * (length - len(labels))
        return ReadRow(
            sample=sample, tokens=inputs, labels=labels, documents=self._starts(inputs, first, end)
        )

    def _starts(self, inputs: Sequence[int], first: int, end: int) -> tuple[int, ...]:
        """Starts of documents in a row: after each end of text that no other end follows."""
        if self.answers is not None:
            last = min(first + len(inputs), self.stop)
            inside = self.ends[bisect_right(self.ends, first) : bisect_left(self.ends, last)]
            return (0, *(end - first for end in inside))
        pairs = pairwise(inputs)
        return (0, *(t for t, (token, after) in enumerate(pairs, 1) if token == end != after))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Encoder of text: bytes, or a tokenizer.json of the `tokenizers` package."""

    file: Path | None
    end: int
    piece_bytes: int

    def inner(self, *, spelled: bool) -> Any:
        """The tokenizer; `spelled`: special tokens in a text become their ids."""
        package: Any = import_module("tokenizers")
        tokenizer = package.Tokenizer.from_file(str(self.file))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = not spelled
        return tokenizer

    def of(self, texts: Sequence[tuple[str, bool]]) -> Iterator[list[int]]:
        """The ids of each text; a long one of a file of text is read in pieces."""
        if self.file is None:
            yield from (list(text.encode()) for text, _ in texts)
            return
        tokenizer = self.inner(spelled=False)
        for text, is_file in texts:
            pieces = self._pieces(text) if is_file else [text]
            encoded = (tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces)
            yield [token for ids in encoded for token in ids]

    def _pieces(self, text: str) -> Iterator[str]:
        """A text in pieces of `piece_bytes`, each with what is left of its last line."""
        left = text.encode()
        while left:
            line = left.find(b"\n", self.piece_bytes)
            end = len(left) if line < 0 or len(left) <= self.piece_bytes else line + 1
            yield left[:end].decode()
            left = left[end:]


def read_source(name: str, tokens: Tokens, *, chats: bool, max_bytes: int) -> SourceText:
    """Read a source as `data.source` and mixtures name it: "stdlib", a file, or a folder."""
    if (Path(name) / "index.json").is_file():
        return _prepared(Path(name))
    ids: list[int] = []
    ends: list[int] = []
    answers: list[bool] = []
    for document, counted in (
        _chats(name, tokens, max_bytes) if chats else _texts(name, tokens, max_bytes)
    ):
        ids += document
        answers += counted
        ends.append(len(ids))
    return SourceText(
        tokens=ids, ends=ends, answers=answers if chats else None, start=0, stop=len(ids)
    )


def _texts(name: str, tokens: Tokens, max_bytes: int) -> Iterator[tuple[list[int], list[bool]]]:
    texts: list[tuple[str, bool]] = []
    for file in files_of(name):
        for text in filter(None, _documents(file)):
            if max_bytes > 0:
                encoded = text.encode()
                cut = encoded[:max_bytes].decode(errors="ignore")
                texts.append((cut, _kind(file) not in _RECORDS))
                max_bytes -= len(encoded)
        if max_bytes <= 0:
            break
    for ids in tokens.of([pair for pair in texts if pair[0]]):
        yield [*ids, tokens.end], []


def files_of(name: str) -> list[Path]:
    """The files of a source, in a folder by their paths; text next to records does not count.

    A folder of `datasets` lists its files. Of several splits the split "train" counts.
    """
    if name == "stdlib" and not Path(name).exists():
        return _standard_library()
    place = Path(name)
    if place.is_file():
        return [place]
    if (place / "dataset_dict.json").is_file():
        place /= "train"
    if (place / "state.json").is_file():
        listed = json.loads((place / "state.json").read_text(encoding="utf-8"))["_data_files"]
        return [place / entry["filename"] for entry in listed]
    files = [
        file
        for file in sorted(place.rglob("*"), key=lambda file: file.relative_to(place).parts)
        if file.is_file() and not any(part[0] == "." for part in file.relative_to(place).parts)
    ]
    files = [file for file in files if _kind(file) in _RECORDS] or files
    splits = [file.name.split(".")[0].rpartition("-of-")[0].rpartition("-")[0] for file in files]
    if len({*splits} - {""}) < 2:
        return files
    return [file for file, split in zip(files, splits, strict=True) if split in ("", "train")]


def _kind(file: Path) -> str:
    return Path(file.name.removesuffix(".gz")).suffix.lower()


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files: list[tuple[bytes, Path]] = []
    for parent, folders, names in os.walk(root):
        folders[:] = [
            folder
            for folder in folders
            if folder not in _OTHER_FOLDERS and not folder.startswith(("config-", "."))
        ]
        for file in (Path(parent, name) for name in names):
            if file.suffix == ".py" and not file.name.startswith("_sysconfigdata"):
                key = hashlib.sha256(file.relative_to(root).as_posix().encode()).digest()
                files.append((key, file))
    return [file for _, file in sorted(files)]


def _documents(file: Path) -> Iterator[str]:
    """The texts of a file: one, or the field "text" of each record."""
    kind = _RECORDS.get(_kind(file))
    if kind == "jsonl":
        yield from (record["text"] for record in _lines(file))
    elif kind == "parquet":
        parquet: Any = import_module("pyarrow.parquet")
        yield from parquet.read_table(file, columns=["text"])["text"].to_pylist()
    elif kind == "arrow":
        arrow: Any = import_module("pyarrow")
        try:
            table = arrow.ipc.open_stream(file.read_bytes()).read_all()
        except arrow.ArrowInvalid:
            table = arrow.ipc.open_file(file.read_bytes()).read_all()
        yield from table["text"].to_pylist()
    else:
        yield _content(file)


def _content(file: Path) -> str:
    data = file.read_bytes()
    return (gzip.decompress(data) if file.suffix.lower() == ".gz" else data).decode()


def _lines(file: Path) -> Iterator[Record]:
    return (json.loads(line) for line in _content(file).split("\n") if line.strip())


def _chats(name: str, tokens: Tokens, max_bytes: int) -> Iterator[tuple[list[int], list[bool]]]:
    assert tokens.file is not None, "a tokenizer of chats is a file"
    template = _Template(tokens)
    for record in (record for file in files_of(name) for record in _lines(file)):
        if max_bytes <= 0:
            return
        text, ids, counted = template.read(record)
        max_bytes -= len(text.encode())
        if ids:
            # Nothing of a chat comes before its first token.
            yield ids, [False, *counted[1:]]


class _Template:
    """The chat template of a tokenizer, as transformers renders it."""

    def __init__(self, tokens: Tokens) -> None:
        assert tokens.file is not None
        folder = tokens.file.parent
        config: dict[str, Any] = {}
        if (folder / "tokenizer_config.json").is_file():
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        special = {key: config[key] for key in _SPECIAL if config.get(key) is not None}
        self._special = {
            key: token["content"] if isinstance(token, dict) else token
            for key, token in special.items()
        }
        source = config.get("chat_template")
        if isinstance(source, list):
            source = next(entry["template"] for entry in source if entry["name"] == "default")
        if (folder / "chat_template.jinja").is_file():
            source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        self._source = str(source)
        self._tokenizer = tokens.inner(spelled=True)
        self._end = self._special.get("eos_token") or self._tokenizer.id_to_token(tokens.end)
        templates: Any = import_module("transformers.utils.chat_template_utils")
        self._render: Any = templates.render_jinja_template

    def read(self, record: Record) -> tuple[str, list[int], list[bool]]:
        """The text of a record, its ids, and which of them are of answers."""
        tools = record.get("tools")
        if "prompt" not in record:
            text, spans = self._with_answers(record["messages"], tools)
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
            counted = [
                any(first < end and start < last for start, end in spans)
                for first, last in encoded.offsets
            ]
            return text, encoded.ids, counted
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str):
            full = prompt + completion + self._end * (not completion.endswith(self._end))
            return self._completed(prompt, full, special=True)
        head, _ = self._rendered(prompt, tools, begins=True)
        full, _ = self._rendered([*prompt, *completion], tools)
        return self._completed(head, full, special=False)

    def _completed(
        self, prompt: str, full: str, *, special: bool
    ) -> tuple[str, list[int], list[bool]]:
        """A prompt with its completion: it begins with the first id that differs (TRL)."""
        head, ids = (
            self._tokenizer.encode(text, add_special_tokens=special).ids for text in (prompt, full)
        )
        pairs = zip(head, ids, strict=False)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return full, ids, [place >= same for place in range(len(ids))]

    def _with_answers(
        self, messages: list[Record], tools: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of messages and the characters of its answers.

        Without blocks of generation an answer is the text that it adds to the chat before it.
        """
        if _GENERATION.search(self._source):
            return self._rendered(messages, tools, marked=True)
        spans: list[tuple[int, int]] = []
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                before, _ = self._rendered(messages[:place], tools, begins=True)
                after, _ = self._rendered(messages[: place + 1], tools)
                spans.append((len(before), len(after)))
        return self._rendered(messages, tools)[0], spans

    def _rendered(
        self, messages: list[Record], tools: Any, *, begins: bool = False, marked: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        (text,), spans = self._render(
            [[_thinking(message) for message in messages]],
            tools=tools,
            chat_template=self._source,
            return_assistant_tokens_mask=marked,
            add_generation_prompt=begins,
            **self._special,
        )
        return text, spans[0] if marked else []


def _thinking(message: Record) -> Record:
    """A message with its reasoning under each name that templates have for it."""
    thought = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    named = {"reasoning_content": thought, "thinking": message.get("thinking", thought)}
    return message if thought is None else {**message, **named}


class _Mapped(Sequence[Any]):
    """Numbers of several files, one after the other; slices are read when they are used."""

    def __init__(self, files: Sequence[Path], dtype: str) -> None:
        self._parts = [np.memmap(file, dtype=dtype, mode="r") for file in files]
        self._length = sum(map(len, self._parts))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(place, slice):
            at = range(self._length)[place]
            return self[at : at + 1][0]
        first, last, _ = place.indices(self._length)
        numbers: list[int] = []
        for part in self._parts:
            numbers += part[max(first, 0) : max(last, 0)].tolist()
            first, last = first - len(part), last - len(part)
        return numbers


class _Bits(Sequence[Any]):
    """Bits of a file, the lowest of each byte first."""

    def __init__(self, file: Path, count: int) -> None:
        self._bytes, self._count = _Mapped([file], "u1"), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(place, slice):
            at = range(self._count)[place]
            return self[at : at + 1][0]
        first, last, _ = place.indices(self._count)
        held = self._bytes[first // 8 : math.ceil(last / 8)]
        return [bool(held[n // 8 - first // 8] >> n % 8 & 1) for n in range(first, last)]


def _prepared(folder: Path) -> SourceText:
    """Tokens that were prepared before, as docs/guides/data.md describes their files."""
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    dtype = {"uint16": "<u2", "uint32": "<u4"}[index["dtype"]]
    tokens = _Mapped([folder / entry["file"] for entry in index["shards"]], dtype)
    ends = _Mapped([folder / index["documents"]["file"]], "<u8")
    answers = index.get("answers")
    bits = None if answers is None else _Bits(folder / answers["file"], answers["count"])
    return SourceText(tokens=tokens, ends=ends, answers=bits, start=0, stop=len(tokens))
