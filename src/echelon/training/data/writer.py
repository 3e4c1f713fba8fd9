# SPDX-License-Identifier: Apache-2.0
"""Write prepared data: to a folder beside its final place, flushed, hashed, then renamed.

A reader sees the whole data or none of it. What ends early leaves nothing; only a process that is
killed outright leaves its `NAME.preparing-...` folder, which nobody reads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from pathlib import Path
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from echelon.config.files.new_file import free_name
from echelon.core.disk import NO_SPACE, flush_folder, write_durably
from echelon.core.errors import DataError, EnvironmentProblem, Problem
from echelon.core.rulebook.data import (
    DATA_ANSWERS_COUNTED,
    DATA_DISK_FULL,
    DATA_EMPTY,
    DATA_OUTPUT_EXISTS,
    DATA_OUTPUT_WRITABLE,
)
from echelon.core.units import binary_bytes
from echelon.training.data.index import (
    ANSWERS_FILE_NAME,
    ANSWERS_SCHEMA,
    DOCUMENTS_FILE_NAME,
    INDEX_FILE_NAME,
    INDEX_SCHEMA,
    AnswersEntry,
    DataFileEntry,
    DatasetIndex,
)
from echelon.training.data.tokenizer import TEMPLATE_FILE_NAME, TOKENIZER_FILE_NAME, Tokenizer

_BLOCK = 2**20  # bytes


class HashedFile:
    """Write a new file and know its size and sha256 when it is closed."""

    def __init__(self, path: Path) -> None:
        """Create the file; it must not exist."""
        self.path = path
        self.num_bytes = 0
        self._stream = path.open("xb", buffering=_BLOCK)
        self._digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        self._stream.write(data)
        self._digest.update(data)
        self.num_bytes += len(data)

    def close(self) -> str:
        """Flush to the disk itself, close, and return the sha256 of the content."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Close without caring whether what is buffered still fits on the disk."""
        with contextlib.suppress(OSError):
            self._stream.close()


class _AnswersFile:
    """Write a bit for each token, eight to a byte, the lowest first."""

    def __init__(self, path: Path, template: str) -> None:
        self._file = HashedFile(path)
        self._template = template
        self._rest = np.zeros(0, dtype=np.bool_)
        self._num_tokens = 0
        self._num_answers = 0

    def write(self, answers: NDArray[np.bool_]) -> None:
        """Append the bits of so many tokens."""
        self._num_tokens += len(answers)
        self._num_answers += int(answers.sum())
        bits = np.concatenate([self._rest, answers])
        whole = len(bits) // 8 * 8
        self._file.write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self._rest = bits[whole:]

    def close(self) -> AnswersEntry:
        """Write what is left, with zeros to the end of its byte, and return the entry."""
        self._file.write(np.packbits(self._rest, bitorder="little").tobytes())
        return AnswersEntry(
            file=self._file.path.name,
            count=self._num_tokens,
            sha256=self._file.close(),
            num_answers=self._num_answers,
            template=self._template,
        )

    def abandon(self) -> None:
        """Close without caring whether it can be written."""
        self._file.abandon()


class DatasetWriter:
    """Take tokens, document after document, and commit them as one folder.

    Use it as a context: leaving it before `commit` removes everything. Failures of the file system
    come out as EnvironmentProblem, with sizes.
    """

    def __init__(
        self, output: Path, tokenizer: Tokenizer, *, shard_tokens: int, template: str | None = None
    ) -> None:
        """Check that `output` is free; nothing is written yet.

        `template` is the text of the chat template where the data is chats: all documents come by
        `add_chat` then.
        """
        assert shard_tokens > 0
        if output.exists() or output.is_symlink():
            raise DataError(_exists(output))
        self._output = output
        self._tokenizer = tokenizer
        self._shard_tokens = shard_tokens
        self._dtype = np.dtype(tokenizer.description.token_dtype).newbyteorder("<")
        self._folder = output.parent / f"{output.name}.preparing-{os.getpid()}-{uuid4().hex[:8]}"
        self._shard: HashedFile | None = None
        self._closed: list[DataFileEntry] = []
        self._documents: HashedFile | None = None
        self._template = template
        self._answers: _AnswersFile | None = None
        self.num_tokens = 0
        self.num_documents = 0
        self._max_token = 0

    def __enter__(self) -> DatasetWriter:
        """Create the folder."""
        try:
            self._folder.mkdir(parents=True)
            self._documents = HashedFile(self._folder / DOCUMENTS_FILE_NAME)
            if self._template is not None:
                digest = hashlib.sha256(self._template.encode()).hexdigest()
                self._answers = _AnswersFile(self._folder / ANSWERS_FILE_NAME, digest)
        except OSError as error:
            self._remove()
            raise EnvironmentProblem(self._problem(error)) from error
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Remove what was not committed, and turn failures of the file system into ours."""
        problem = self._problem(error) if isinstance(error, OSError) else None
        self._remove()
        if problem is not None:
            raise EnvironmentProblem(problem) from error

    def add(self, tokens: NDArray[np.uint32], *, ends_document: bool) -> None:
        """Append `tokens`; `ends_document` adds the end-of-document and notes the boundary."""
        assert self._answers is None
        if ends_document:
            end = np.uint32(self._tokenizer.description.end_of_document)
            tokens = np.append(tokens, end)
        self._append(tokens, ends_document=ends_document)

    def add_chat(self, tokens: NDArray[np.uint32], answers: NDArray[np.bool_]) -> None:
        """Append a chat as its template wrote it: a document without another end.

        `answers` says which of its tokens are of answers. The first is none: nothing in the chat
        comes before it that it could be told from.
        """
        assert self._answers is not None
        assert len(tokens) == len(answers)
        answers = answers.copy()
        answers[:1] = False
        self._append(tokens, ends_document=bool(len(tokens)))
        self._answers.write(answers)

    def _append(self, tokens: NDArray[np.uint32], *, ends_document: bool) -> None:
        if not len(tokens):
            return
        self._max_token = max(self._max_token, int(tokens.max()))
        while len(tokens):
            shard = self._open_shard()
            room = self._shard_tokens - shard.num_bytes // self._dtype.itemsize
            shard.write(tokens[:room].astype(self._dtype).tobytes())
            self.num_tokens += min(room, len(tokens))
            tokens = tokens[room:]
        if ends_document:
            assert self._documents is not None
            self._documents.write(self.num_tokens.to_bytes(8, "little"))
            self.num_documents += 1

    def commit(self) -> DatasetIndex:
        """Flush, write the index, and rename the folder to its final place."""
        if not self.num_documents:
            raise DataError(DATA_EMPTY.problem("the sources hold no text: 0 documents"))
        index = self._close_files()
        if index.answers is not None and not index.answers.num_answers:
            raise DataError(
                DATA_ANSWERS_COUNTED.problem(
                    f"no token of the {self.num_documents} chats is of an answer",
                    suggestions=('messages with "role": "assistant"', '"completion": "TEXT"'),
                )
            )
        write_durably(self._folder / INDEX_FILE_NAME, index.to_text().encode())
        flush_folder(self._folder)
        if self._output.exists():
            raise DataError(_exists(self._output))
        try:
            self._folder.rename(self._output)
        except OSError as error:
            # Another process may have committed in between; rename never replaces a full folder.
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise DataError(_exists(self._output)) from error
            raise
        flush_folder(self._output.parent)
        return index

    def _close_files(self) -> DatasetIndex:
        assert self._documents is not None
        self._close_shard()
        stored = self._tokenizer.to_json()
        if stored is not None:
            write_durably(self._folder / TOKENIZER_FILE_NAME, stored.encode())
        documents = DataFileEntry(
            file=DOCUMENTS_FILE_NAME, count=self.num_documents, sha256=self._documents.close()
        )
        answers = None if self._answers is None else self._answers.close()
        if self._template is not None:
            write_durably(self._folder / TEMPLATE_FILE_NAME, self._template.encode())
        return DatasetIndex(
            dtype="uint16" if self._dtype.itemsize == 2 else "uint32",
            num_tokens=self.num_tokens,
            max_token=self._max_token,
            tokenizer=self._tokenizer.description,
            shards=tuple(self._closed),
            documents=documents,
            schema=INDEX_SCHEMA if answers is None else ANSWERS_SCHEMA,
            answers=answers,
        ).with_hash()

    def _open_shard(self) -> HashedFile:
        if self._shard and self._shard.num_bytes >= self._shard_tokens * self._dtype.itemsize:
            self._close_shard()
        if self._shard is None:
            self._shard = HashedFile(self._folder / f"shard-{len(self._closed):05d}.bin")
        return self._shard

    def _close_shard(self) -> None:
        if self._shard is None:
            return
        digest = self._shard.close()
        count = self._shard.num_bytes // self._dtype.itemsize
        self._closed.append(DataFileEntry(file=self._shard.path.name, count=count, sha256=digest))
        self._shard = None

    def _remove(self) -> None:
        for file in (self._shard, self._documents, self._answers):
            if file is not None:
                file.abandon()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _problem(self, error: OSError) -> Problem:
        if error.errno not in NO_SPACE:
            return DATA_OUTPUT_WRITABLE.problem(
                f"{self._output} cannot be written: {error.strerror or error}",
                suggestions=("--set train.runs_dir=FOLDER, or --out FOLDER", "a folder of yours"),
            )
        there = next(parent for parent in self._output.absolute().parents if parent.exists())
        free = shutil.disk_usage(there).free
        written = self.num_tokens * self._dtype.itemsize
        return DATA_DISK_FULL.problem(
            f"{error.strerror} after {binary_bytes(written)} ({self.num_tokens} tokens) of "
            f"{self._output}; {binary_bytes(free)} are free there"
        )


def _exists(output: Path) -> Problem:
    return DATA_OUTPUT_EXISTS.problem(
        f"{output} exists; prepared data is never written over",
        suggestions=(f"--out {free_name(output)}",),
    )
