# SPDX-License-Identifier: Apache-2.0
"""Read samples from prepared data through a memory map.

Shape suffixes: B sequences, T positions.

Sample `i` of a part of n tokens is inputs [i T, i T + T) and labels one further. The samples lie
end to end, so each token but the first is the label of exactly one position; the last sample is
filled up with end-of-document, and its surplus positions are not counted. Nothing is dropped, and
how many labels count is arithmetic: every rank knows the global number without a message. Where
only answers count, it is a sum over the bits of the samples, an eighth of a byte for each token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echelon.config.job import TrainOn
from echelon.core.attention_mask import DocumentStarts
from echelon.core.disk import sha256_of_file
from echelon.core.errors import DataError, Problem
from echelon.core.rulebook.data import (
    DATA_ANSWERS_TOLD,
    DATA_SHARD_HASH,
    DATA_SPLIT_FRACTION,
    DATA_TOKEN_RANGE,
    DATA_TOO_SHORT,
)
from echelon.training.data.index import DatasetIndex, read_index, size_problems
from echelon.training.data.tokenizer import Tokenizer, load_tokenizer, require_same_tokenizer

IGNORED_LABEL = -100
"""The label of a position that takes no part in the loss."""
_PIECE = 2**22  # tokens whose bits are counted together


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenDataset:
    """Hold a part [start, stop) of the tokens of prepared data, memory-mapped."""

    path: Path
    index: DatasetIndex
    start: int
    stop: int
    _shards: tuple[NDArray[np.unsignedinteger], ...] = field(repr=False)
    _shard_starts: NDArray[np.int64] = field(repr=False)
    answers_only: bool = False

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = False) -> TokenDataset:
        """Map the prepared data at `path`.

        The index and the size of every file are always checked; `verify` reads all of it and checks
        every sha256 (about 1 GB/s), which one process does before the ranks of a run start.
        """
        folder = Path(path)
        index = read_index(folder)
        problems = size_problems(folder, index)
        if verify and not problems:
            problems = _hash_problems(folder, index)
        if problems:
            raise DataError(problems)
        dtype = np.dtype(index.dtype).newbyteorder("<")
        shards = tuple(
            np.memmap(folder / entry.file, dtype=dtype, mode="r", shape=(entry.count,))
            for entry in index.shards
        )
        starts = np.cumsum([0] + [entry.count for entry in index.shards], dtype=np.int64)
        return cls(
            path=folder,
            index=index,
            start=0,
            stop=index.num_tokens,
            _shards=shards,
            _shard_starts=starts,
        )

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in this part."""
        return self.stop - self.start

    def num_samples(self, sequence_length: int) -> int:
        """Return the number of samples; DataError where there is not one full sample."""
        if self.num_tokens <= sequence_length:
            raise DataError(
                DATA_TOO_SHORT.problem(
                    f"sequence_length = {sequence_length} needs {sequence_length + 1} tokens, and "
                    f"this part of {self.path} has {self.num_tokens} (of {self.index.num_tokens})",
                    key="batch.sequence_length",
                    suggestions=[f"at most {self.num_tokens - 1}"] if self.num_tokens > 1 else [],
                )
            )
        return -(-(self.num_tokens - 1) // sequence_length)

    def counting(self, train_on: TrainOn) -> TokenDataset:
        """Return the data whose labels count that `train_on` names.

        DataError where answers are asked for of data that tells no answers apart.
        """
        if train_on == "answers" and self.index.answers is None:
            raise DataError(
                DATA_ANSWERS_TOLD.problem(
                    f"{self.path} is prepared text: it does not say which tokens are of answers",
                    key="data.train_on",
                    suggestions=(
                        "echelon data prepare CHATS.jsonl --format chat --out NEW",
                        'data.train_on = "all"',
                    ),
                )
            )
        return replace(self, answers_only=train_on == "answers")

    @property
    def shows_ends(self) -> bool:
        """True if the token that ends a document is at the end of each, and nowhere else.

        For chats the template decides.
        """
        return self.index.answers is None

    def num_answers(self) -> int:
        """Return how many labels of this part are of answers; 0 where none are told apart."""
        if self.index.answers is None:
            return 0
        places = range(self.start + 1, self.stop, _PIECE)
        return sum(int(self._bits(at, min(at + _PIECE, self.stop)).sum()) for at in places)

    def count_valid(self, sample_ids: NDArray[np.int64], sequence_length: int) -> int:
        """Return how many labels of these samples count, without reading their tokens."""
        if self.answers_only:
            firsts = (np.asarray(sample_ids, dtype=np.int64) * sequence_length).tolist()
            return sum(
                int(self._answers(first + 1, first + 1 + sequence_length).sum()) for first in firsts
            )
        left = self.num_tokens - 1 - np.asarray(sample_ids, dtype=np.int64) * sequence_length
        return int(np.clip(left, 0, sequence_length).sum())

    def read(
        self, sample_ids: NDArray[np.int64], sequence_length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (inputs_BT, labels_BT) of the samples, int64.

        Positions past the end of the part, and whole samples past the last one, hold
        end-of-document as input and `IGNORED_LABEL` as label.
        """
        ids = np.asarray(sample_ids, dtype=np.int64)
        assert ids.ndim == 1
        assert not len(ids) or ids.min() >= 0
        end = self.index.tokenizer.end_of_document
        inputs_BT = np.full((len(ids), sequence_length), end, dtype=np.int64)
        labels_BT = np.full((len(ids), sequence_length), IGNORED_LABEL, dtype=np.int64)
        for row, sample in enumerate(ids.tolist()):
            tokens = self.tokens(sample * sequence_length, (sample + 1) * sequence_length + 1)
            num_inputs = min(len(tokens), sequence_length)
            inputs_BT[row, :num_inputs] = tokens[:num_inputs]
            if len(tokens) > 1:
                labels = tokens[1:]
                if self.answers_only:
                    first = sample * sequence_length + 1
                    answers = self._answers(first, first + sequence_length)
                    labels = np.where(answers, labels, IGNORED_LABEL)
                labels_BT[row, : len(tokens) - 1] = labels
        self._check_range(inputs_BT, labels_BT)
        return inputs_BT, labels_BT

    def document_starts(
        self, sample_ids: NDArray[np.int64], inputs_BT: NDArray[np.int64]
    ) -> DocumentStarts:
        """Return, for each of these samples, the positions where documents start.

        Text shows its ends of documents. A template may write that token inside of a chat, or
        nowhere, so where chats end is read from the file of documents.
        """
        if self.shows_ends:
            return document_starts(inputs_BT, self.index.tokenizer.end_of_document)
        length = inputs_BT.shape[1]
        ends = self._document_ends()
        found: list[tuple[int, ...]] = []
        for sample in np.asarray(sample_ids, dtype=np.int64).tolist():
            first = self.start + sample * length
            last = min(first + length, self.stop)
            begin, stop = np.searchsorted(ends, np.asarray([first + 1, last], dtype=np.uint64))
            found.append((0, *(int(end) - first for end in ends[int(begin) : int(stop)])))
        return tuple(found)

    def tokens(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the tokens [start, stop) of this part, fewer where it ends before."""
        start = min(self.start + start, self.stop)
        stop = min(self.start + stop, self.stop)
        out = np.empty(stop - start, dtype=np.int64)
        shard = int(np.searchsorted(self._shard_starts, start, side="right")) - 1
        done = 0
        while done < len(out):
            begin = start + done - int(self._shard_starts[shard])
            piece = self._shards[shard][begin : begin + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            shard += 1
        return out

    def document_lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each document, its end among them; of this part, as it is cut."""
        ends = self._document_ends()
        inside = ends[(ends > self.start) & (ends < self.stop)].astype(np.int64)
        return np.diff(np.concatenate([[self.start], inside, [self.stop]]).astype(np.int64))

    def split(self, validation_fraction: float) -> tuple[TokenDataset, TokenDataset]:
        """Return (training part, validation part): disjoint, in order, together everything.

        The validation part is the tail. The cut lies between the two documents nearest to the
        wanted place, unless that would make the tail less than half or more than twice as large as
        wanted (few long documents); then it lies inside a document.
        """
        if not 0.0 < validation_fraction < 1.0:
            raise DataError(
                DATA_SPLIT_FRACTION.problem(
                    f"validation_fraction = {validation_fraction} is not between 0 and 1",
                    key="data.validation_fraction",
                    suggestions=("data.validation_fraction = 0.01",),
                )
            )
        wanted = round(self.num_tokens * validation_fraction)
        cut = self._cut(self.stop - wanted, wanted)
        if not self.start < cut < self.stop:
            raise DataError(
                DATA_SPLIT_FRACTION.problem(
                    f"{validation_fraction} of {self.num_tokens} tokens leaves {cut - self.start} "
                    f"for training and {self.stop - cut} for validation",
                    key="data.validation_fraction",
                    suggestions=(f"data.validation_fraction = {self._least_fraction():g}",),
                )
            )
        return replace(self, stop=cut), replace(self, start=cut)

    def _least_fraction(self) -> float:
        """Return the least share of the tokens that leaves some for validation."""
        return min(0.5, ceil(200 / max(self.num_tokens, 2)) / 100)

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raise DataError where the data holds a token id that the model has no row for."""
        if self.index.max_token >= vocabulary:
            raise DataError(
                DATA_TOKEN_RANGE.problem(
                    f"{self.path} holds token id {self.index.max_token}, the model has a "
                    f"vocabulary of {vocabulary} (ids 0 to {vocabulary - 1})",
                    key="model.vocab",
                    suggestions=(self.index.tokenizer.vocabulary,),
                )
            )

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the data, read from beside it."""
        name = "bytes" if self.index.tokenizer.name == "bytes" else str(self.path)
        found = load_tokenizer(name)
        require_same_tokenizer(
            self.index.tokenizer, found.description, expected_by="tokenizer.json beside it"
        )
        return found

    def _cut(self, place: int, wanted: int) -> int:
        ends = self._document_ends()
        right = int(np.searchsorted(ends, np.uint64(max(place, 0))))
        around = [int(ends[i]) for i in (right - 1, right) if 0 <= i < len(ends)]
        nearest = min(around, key=lambda end: abs(end - place))
        size = self.stop - nearest
        return nearest if wanted <= 2 * size <= 4 * wanted else place

    def _document_ends(self) -> NDArray[np.uint64]:
        entry = self.index.documents
        return np.memmap(self.path / entry.file, dtype="<u8", mode="r", shape=(entry.count,))

    def _answers(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which tokens [start, stop) of this part are of answers, fewer where it ends."""
        return self._bits(min(self.start + start, self.stop), min(self.start + stop, self.stop))

    def _bits(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which tokens [start, stop) of the whole data are of answers."""
        entry = self.index.answers
        assert entry is not None
        num_bytes = -(-entry.count // 8)
        packed = np.memmap(self.path / entry.file, dtype=np.uint8, mode="r", shape=(num_bytes,))
        bits = np.unpackbits(packed[start // 8 : -(-stop // 8)], bitorder="little")
        first = start // 8 * 8
        return bits[start - first : stop - first].astype(np.bool_)

    def _check_range(self, inputs_BT: NDArray[np.int64], labels_BT: NDArray[np.int64]) -> None:
        # Data changed after it was opened shows here, before it reaches an embedding.
        largest = max(self.index.tokenizer.end_of_document, self.index.max_token)
        found = max(int(inputs_BT.max(initial=0)), int(labels_BT.max(initial=0)))
        if found > largest:
            raise DataError(
                DATA_TOKEN_RANGE.problem(
                    f"{self.path} holds token id {found}, its index states at most {largest}: a "
                    "shard was changed"
                )
            )


def document_starts(tokens_BT: NDArray[np.int64], end_of_document: int) -> DocumentStarts:
    """Return, for each sequence, the positions where a document (or the rest of one) starts.

    End-of-document belongs to the document that it ends; several in a row, as they fill up the last
    sample, do not start new ones.
    """
    ends_BT = tokens_BT == end_of_document
    starts_BT = ends_BT[:, :-1] & ~ends_BT[:, 1:]
    return tuple((0, *(int(t) + 1 for t in np.flatnonzero(row))) for row in starts_BT)


def _hash_problems(folder: Path, index: DatasetIndex) -> list[Problem]:
    answers = () if index.answers is None else (index.answers,)
    return [
        DATA_SHARD_HASH.problem(
            f"{folder / entry.file} has sha256 {found[:12]}, the index states {entry.sha256[:12]}"
        )
        for entry in (*index.shards, index.documents, *answers)
        if (found := sha256_of_file(folder / entry.file)) != entry.sha256
    ]
