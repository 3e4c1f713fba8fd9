# SPDX-License-Identifier: Apache-2.0
"""`echelon data prepare` and `echelon data show`: text to memory-mapped token shards.

The same sources and options give the same bytes. Memory stays bounded whatever the size of the
corpus: text passes through in batches of a few MiB.

The built-in corpus, "stdlib", is the source of Python's standard library, which is on every
machine. Tests, installed packages, machine-written tables (code pages, build settings, help topics)
and the compiled are left out: about 10 MB of text that people wrote.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.core.errors import DataError
from echelon.core.messages.notes import PROGRESS
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.rulebook.data import DATA_EMPTY
from echelon.core.units import decimal_bytes
from echelon.training.data.chats import ChatEncoder, read_chats
from echelon.training.data.dataset import TokenDataset
from echelon.training.data.index import DatasetIndex
from echelon.training.data.records import DocumentChunk, read_chunks
from echelon.training.data.sources import SourceFile, SourceFiles, SourceFormat, find_files
from echelon.training.data.tokenizer import load_tokenizer, train_tokenizer, trained_vocabulary
from echelon.training.data.writer import DatasetWriter

STDLIB = "stdlib"

_LEFT_OUT_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idle_test",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}


def stdlib_files(folder: Path | None = None) -> tuple[SourceFile, ...]:
    """Return the source files, in the order of the hash of their names.

    So the head of the corpus (under a limit) and its tail (the validation part) are both samples of
    all of it, and not the modules from "a" or those up to "z".
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    found: list[SourceFile] = []
    for parent, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in _LEFT_OUT_FOLDERS and not name.startswith(("config-", "."))
        ]
        for name in names:
            path = Path(parent, name)
            if name.endswith(".py") and not name.startswith("_sysconfigdata") and path.is_file():
                found.append(
                    SourceFile(path=path, name=path.relative_to(root).as_posix(), format="text")
                )
    if not found:
        raise DataError(
            DATA_EMPTY.problem(
                f"this Python keeps no source of its standard library in {root}; name a source",
                key="data.source",
            )
        )
    return tuple(sorted(found, key=lambda file: hashlib.sha256(file.name.encode()).digest()))


_BATCH_TEXTS = 4  # pieces of text of full size


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """Say how sources are read and written.

    `field` is the field or column of records that holds the text, `split` the part of a Hugging
    Face dataset, `max_bytes` the number of bytes of text after which to stop, `training_bytes` how
    much of the text a "bpe-N" tokenizer is trained on, `shard_tokens` the size of a shard.
    """

    format: SourceFormat = "auto"
    field: str = "text"
    split: str = "train"
    max_bytes: int | None = None
    training_bytes: int = 64 * 2**20
    shard_tokens: int = 2**27


DEFAULT_OPTIONS = PrepareOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSummary:
    """Say what prepared data is: where, how much of it, and what made it."""

    path: str
    """Its folder."""
    num_tokens: int
    """Tokens."""
    num_documents: int
    """Documents."""
    num_shards: int
    """Files of tokens."""
    num_bytes: int
    """Bytes of those files."""
    dtype: str
    """Integer type of a token."""
    max_token: int
    """The largest token id."""
    tokenizer: str
    """The tokenizer that made it."""
    vocabulary: int
    """Token ids of the tokenizer."""
    tokenizer_hash: str
    """Hash of the tokenizer."""
    hash: str
    """Hash of the data."""
    num_answers: int | None = None
    """Tokens of answers; None where the data is no chats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSummary:
    """Say what was prepared from how much, and what was passed over.

    `num_empty` counts empty files and records; `skipped` counts files in folders by the suffix, or
    the split, for which they were not read.
    """

    dataset: DatasetSummary
    num_files: int
    text_bytes: int
    num_empty: int
    skipped: Mapping[str, int]


def prepare(
    sources: Sequence[str | Path],
    output: str | Path,
    *,
    tokenizer: str = "bytes",
    options: PrepareOptions = DEFAULT_OPTIONS,
    pieces: PieceSizes = TRAINING_PIECES,
) -> PrepareSummary:
    """Write the text of `sources` as token shards to the new folder `output`.

    A source is a text, jsonl, parquet or arrow file, a folder of them, a folder that Hugging Face's
    `save_to_disk` wrote, or "stdlib", the source of Python's standard library. `tokenizer` is
    "bytes", "bpe-N" (trained on the sources) or the path of a tokenizer.json. With the format
    "chat" it has a chat template beside it, and the data tells tokens of answers apart. Files are
    read and written in `pieces`.
    """
    target = Path(output)
    files = source_files(sources, options)
    options = replace(options, shard_tokens=min(options.shard_tokens, pieces.shard_tokens))
    if options.format == "chat":
        return _prepare_chats(files, target, tokenizer, options)
    trained = trained_vocabulary(tokenizer)
    if trained is None:
        encoder = load_tokenizer(tokenizer)
        writer = DatasetWriter(target, encoder, shard_tokens=options.shard_tokens)
    else:
        # Training is the slow part: a taken output is refused before it and checked again after.
        DatasetWriter(target, load_tokenizer("bytes"), shard_tokens=options.shard_tokens)
        encoder = train_tokenizer(tokenizer, _training_texts(files, options, pieces))
        writer = DatasetWriter(target, encoder, shard_tokens=options.shard_tokens)
    with writer:
        text = _ChunkReader(files, options, pieces)
        for batch in _batches(text, pieces):
            encoded = encoder.encode_chunks([piece.text for piece in batch])
            for tokens, piece in zip(encoded, batch, strict=True):
                writer.add(tokens, ends_document=piece.last)
            PROGRESS.info(f"{decimal_bytes(text.num_bytes)} of text read")
        index = writer.commit()
    return PrepareSummary(
        dataset=_summary(target, index),
        num_files=len(files.files),
        text_bytes=text.num_bytes,
        num_empty=text.num_empty,
        skipped=files.skipped,
    )


def _prepare_chats(
    files: SourceFiles, target: Path, tokenizer: str, options: PrepareOptions
) -> PrepareSummary:
    encoder = ChatEncoder.load(tokenizer)
    chats = read_chats(files, encoder, max_bytes=options.max_bytes)
    writer = DatasetWriter(
        target,
        encoder.tokenizer,
        shard_tokens=options.shard_tokens,
        template=encoder.template.source,
    )
    num_bytes = num_empty = 0
    with writer:
        for chat in chats:
            num_bytes += chat.num_bytes
            num_empty += not len(chat.tokens)
            writer.add_chat(chat.tokens, chat.answers)
            PROGRESS.info(f"{decimal_bytes(num_bytes)} of chats read")
        index = writer.commit()
    return PrepareSummary(
        dataset=_summary(target, index),
        num_files=len(files.files),
        text_bytes=num_bytes,
        num_empty=num_empty,
        skipped=files.skipped,
    )


def describe(path: str | Path) -> DatasetSummary:
    """Return what the prepared data at `path` is; DataError where it is missing or damaged."""
    dataset = TokenDataset.open(path, verify=True)
    return _summary(dataset.path, dataset.index)


def source_files(sources: Sequence[str | Path], options: PrepareOptions) -> SourceFiles:
    """Return the files that `prepare` would read, in order."""
    if [str(source) for source in sources] == [STDLIB] and not Path(STDLIB).exists():
        return SourceFiles(files=stdlib_files())
    return find_files(sources, format=options.format, split=options.split)


class _ChunkReader:
    """Iterate over the pieces of all files, up to the limit, counting what passes."""

    def __init__(self, files: SourceFiles, options: PrepareOptions, pieces: PieceSizes) -> None:
        self._files, self._pieces = files, pieces
        self._options = options
        self.num_bytes = 0
        self.num_empty = 0

    def __iter__(self) -> Iterator[DocumentChunk]:
        limit = self._options.max_bytes
        begun = False
        for file in self._files.files:
            for piece in read_chunks(file, field=self._options.field, pieces=self._pieces):
                if not piece.text and not begun:
                    self.num_empty += 1
                    continue
                room = None if limit is None else limit - self.num_bytes
                if room is not None and len(piece.text) >= room:
                    # No character is split: what is left of the last one is left out.
                    text = piece.text[:room].decode("utf-8", errors="ignore").encode("utf-8")
                    self.num_bytes += len(text)
                    if text or begun:
                        yield DocumentChunk(text, last=True)
                    return
                self.num_bytes += len(piece.text)
                yield piece
                begun = not piece.last


def _batches(chunks: Iterable[DocumentChunk], pieces: PieceSizes) -> Iterator[list[DocumentChunk]]:
    batch: list[DocumentChunk] = []
    held = 0
    for piece in chunks:
        batch.append(piece)
        held += len(piece.text)
        if held >= _BATCH_TEXTS * pieces.text_bytes or len(batch) >= pieces.record_rows:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _training_texts(
    files: SourceFiles, options: PrepareOptions, pieces: PieceSizes
) -> Iterator[str]:
    text = _ChunkReader(files, options, pieces)
    for piece in text:
        yield piece.text.decode("utf-8")
        if text.num_bytes >= options.training_bytes:
            return
    if not text.num_bytes:
        raise DataError(DATA_EMPTY.problem("the sources hold no text to train a tokenizer on"))


def _summary(folder: Path, index: DatasetIndex) -> DatasetSummary:
    return DatasetSummary(
        path=str(folder),
        num_tokens=index.num_tokens,
        num_documents=index.documents.count,
        num_shards=len(index.shards),
        num_bytes=sum(index.sizes().values()),
        dtype=index.dtype,
        max_token=index.max_token,
        tokenizer=index.tokenizer.name,
        vocabulary=index.tokenizer.vocabulary,
        tokenizer_hash=index.tokenizer.hash,
        hash=index.hash,
        num_answers=None if index.answers is None else index.answers.num_answers,
    )
