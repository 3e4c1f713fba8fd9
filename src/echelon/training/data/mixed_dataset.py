# SPDX-License-Identifier: Apache-2.0
"""Prepared data of several sources, read as one: a folder with a mixture.json that names them.

The samples of all sources stand one after the other: sample i of source s has the number
start of s + i. A mixture has no tokens of its own, and one tokenizer. `open_data` opens either.

A phase of a mixture has a weight for each source. Its sequences follow a pattern of 65,536 places,
in which a source has as many places as its weight says (the largest remainders are rounded up),
spread evenly: any stretch of sequences holds each source in its share, to one or two sequences. So
where sequence number i of step N comes from, and how many sequences its source gave before, is
arithmetic: nothing is drawn, nothing is kept, and the number of ranks has no part in it.

Shape suffixes: S sources, P places of the pattern, B sequences.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.config.job import TrainOn
from echelon.core.attention_mask import DocumentStarts
from echelon.core.disk import disk_errors
from echelon.core.errors import DataError, Problem
from echelon.core.rulebook.data import DATA_INDEX, DATA_TOKENIZER_SAME
from echelon.core.serialize import content_hash, decode_json, from_json, to_json
from echelon.core.settings.list_types import MIXTURE_PLACES, MixturePhase, places_of
from echelon.training.data.dataset import IGNORED_LABEL, TokenDataset
from echelon.training.data.tokenizer import Tokenizer, TokenizerDescription

MIXTURE_FILE_NAME = "mixture.json"
MIXTURE_SCHEMA = 1  # of the written JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureFile:
    """List the sources of a mixture: what the user named, where it is prepared, its hash."""

    names: tuple[str, ...]
    folders: tuple[str, ...]
    hashes: tuple[str, ...]
    phases: tuple[MixturePhase, ...]
    schema: int = MIXTURE_SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureIndex:
    """Describe a mixture as the index of prepared data does."""

    tokenizer: TokenizerDescription
    max_token: int
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixedDataset:
    """Hold a part of each of several prepared sources, and from which a step reads what."""

    path: Path
    names: tuple[str, ...]
    parts: tuple[TokenDataset, ...]
    mixture: Mixture
    index: MixtureIndex = field(repr=False)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all sources."""
        return sum(part.num_tokens for part in self.parts)

    def num_samples(self, sequence_length: int) -> int:
        """Return the number of samples; DataError where a source has not one full sample."""
        return int(self._starts(sequence_length)[-1])

    def count_valid(self, sample_ids: NDArray[np.int64], sequence_length: int) -> int:
        """Return how many labels of these samples count, without reading them."""
        return sum(
            part.count_valid(local, sequence_length)
            for part, _, local in self._by_source(sample_ids, sequence_length)
        )

    def read(
        self, sample_ids: NDArray[np.int64], sequence_length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (inputs_BT, labels_BT) of the samples, as `TokenDataset.read` does."""
        shape = len(sample_ids), sequence_length
        inputs_BT = np.full(shape, self.index.tokenizer.end_of_document, dtype=np.int64)
        labels_BT = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        for part, rows, local in self._by_source(sample_ids, sequence_length):
            inputs_BT[rows], labels_BT[rows] = part.read(local, sequence_length)
        return inputs_BT, labels_BT

    def counting(self, train_on: TrainOn) -> MixedDataset:
        """Return the data whose labels count that `train_on` names, as `TokenDataset` does."""
        problems: list[Problem] = []
        parts: list[TokenDataset] = []
        for part in self.parts:
            try:
                parts.append(part.counting(train_on))
            except DataError as error:
                problems += error.problems
        if problems:
            raise DataError(problems)
        return replace(self, parts=tuple(parts))

    @property
    def shows_ends(self) -> bool:
        """True if each source shows the ends of its documents by their token alone."""
        return all(part.shows_ends for part in self.parts)

    def num_answers(self) -> int:
        """Return how many labels of all sources are of answers."""
        return sum(part.num_answers() for part in self.parts)

    def document_lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each document of all sources."""
        return np.concatenate([part.document_lengths() for part in self.parts])

    def document_starts(
        self, sample_ids: NDArray[np.int64], inputs_BT: NDArray[np.int64]
    ) -> DocumentStarts:
        """Return, for each of these samples, the positions where documents start."""
        found: list[tuple[int, ...]] = [(0,)] * len(sample_ids)
        for part, rows, local in self._by_source(sample_ids, inputs_BT.shape[1]):
            starts = part.document_starts(local, inputs_BT[rows])
            for row, own in zip(rows.tolist(), starts, strict=True):
                found[row] = own
        return tuple(found)

    def ids(
        self, source_B: NDArray[np.int64], local_B: NDArray[np.int64], sequence_length: int
    ) -> NDArray[np.int64]:
        """Return the numbers of samples in the mixture, of those in their sources."""
        return self._starts(sequence_length)[source_B] + local_B

    def sources(self, sample_ids: NDArray[np.int64], sequence_length: int) -> NDArray[np.int64]:
        """Return the source of each sample; the last one of those past the end."""
        found = np.searchsorted(self._starts(sequence_length), sample_ids, side="right") - 1
        return np.minimum(found, len(self.parts) - 1)

    def split(self, validation_fraction: float) -> tuple[MixedDataset, MixedDataset]:
        """Return (training part, validation part): each source is split."""
        pairs = [part.split(validation_fraction) for part in self.parts]
        training, validation = zip(*pairs, strict=True)
        return replace(self, parts=training), replace(self, parts=validation)

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raise DataError where a source holds a token id that the model has no row for."""
        problems: list[Problem] = []
        for part in self.parts:
            try:
                part.check_vocabulary(vocabulary)
            except DataError as error:
                problems += error.problems
        if problems:
            raise DataError(problems)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the data of all sources."""
        return self.parts[0].tokenizer()

    def _starts(self, sequence_length: int) -> NDArray[np.int64]:
        counts = [part.num_samples(sequence_length) for part in self.parts]
        return np.cumsum([0, *counts], dtype=np.int64)

    def _by_source(
        self, sample_ids: NDArray[np.int64], sequence_length: int
    ) -> list[tuple[TokenDataset, NDArray[np.int64], NDArray[np.int64]]]:
        """Return each source that is read, the rows, and the samples of the source there."""
        starts = self._starts(sequence_length)
        source_B = self.sources(sample_ids, sequence_length)
        found: list[tuple[TokenDataset, NDArray[np.int64], NDArray[np.int64]]] = []
        for source in np.unique(source_B).tolist():
            rows = np.flatnonzero(source_B == source)
            found.append((self.parts[source], rows, sample_ids[rows] - starts[source]))
        return found


AnyDataset = TokenDataset | MixedDataset
"""What a run reads: one source, or a mixture."""


def open_data(path: str | Path, *, verify: bool = False, train_on: TrainOn = "all") -> AnyDataset:
    """Open prepared data, or a mixture of it; `verify` reads all of it and checks every hash.

    `train_on` says which labels count.
    """
    return _open(Path(path), verify=verify).counting(train_on)


def _open(folder: Path, *, verify: bool) -> AnyDataset:
    if not (folder / MIXTURE_FILE_NAME).is_file():
        return TokenDataset.open(folder, verify=verify)
    file = folder / MIXTURE_FILE_NAME
    try:
        found = from_json(MixtureFile, decode_json(file.read_bytes()), where=str(file))
        if found.schema != MIXTURE_SCHEMA or len(found.folders) != len(found.names):
            raise ValueError(f"{file} has schema {found.schema}")
    except (OSError, ValueError) as error:
        raise DataError(DATA_INDEX.problem(f"{file} cannot be read: {error}")) from error
    parts = tuple(TokenDataset.open(one, verify=verify) for one in found.folders)
    changed = [
        DATA_INDEX.problem(f"{name} ({part.path}) has changed since {file} was written")
        for name, part, known in zip(found.names, parts, found.hashes, strict=True)
        if part.index.hash != known
    ]
    if changed:
        raise DataError(changed)
    return mix(folder, found.names, parts, found.phases)


def mix(
    path: Path,
    names: Sequence[str],
    parts: Sequence[TokenDataset],
    phases: Sequence[MixturePhase],
) -> MixedDataset:
    """Return sources as one; DataError where their tokenizers differ."""
    first = parts[0].index.tokenizer
    differ = [
        DATA_TOKENIZER_SAME.problem(
            f"{name} was made with tokenizer {part.index.tokenizer.name!r} "
            f"({part.index.tokenizer.hash[:12]}), {names[0]} with {first.name!r} "
            f"({first.hash[:12]})",
            key="data.mixture",
            suggestions=(
                "echelon data prepare SOURCE --tokenizer tokenizer.json, the same for each",
            ),
        )
        for name, part in zip(names, parts, strict=True)
        if part.index.tokenizer.hash != first.hash
    ]
    if differ:
        raise DataError(differ)
    told: dict[str, Any] = {
        "parts": [part.index.hash for part in parts],
        "phases": to_json(tuple(phases)),
    }
    return MixedDataset(
        path=path,
        names=tuple(names),
        parts=tuple(parts),
        mixture=Mixture(phases=tuple(phases)),
        index=MixtureIndex(
            tokenizer=first,
            max_token=max(part.index.max_token for part in parts),
            hash=content_hash(told),
        ),
    )


def write_mixture(folder: Path, mixed: MixedDataset) -> None:
    """Write the mixture.json of a mixture; one that is there says the same."""
    told = MixtureFile(
        names=mixed.names,
        folders=tuple(str(part.path.absolute()) for part in mixed.parts),
        hashes=tuple(part.index.hash for part in mixed.parts),
        phases=mixed.mixture.phases,
    )
    with disk_errors(f"to write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f".{MIXTURE_FILE_NAME}"
        new.write_text(json.dumps(to_json(told), indent=2) + "\n", encoding="utf-8")
        new.replace(folder / MIXTURE_FILE_NAME)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pattern:
    """Hold the places of a phase: whose each is, and the how manyth of its source."""

    source_P: NDArray[np.int64]
    before_P: NDArray[np.int64]
    places_S: NDArray[np.int64]

    def first(self, count: int) -> NDArray[np.int64]:
        """Return how many of the first `count` sequences each source gives."""
        whole, rest = divmod(count, MIXTURE_PLACES)
        some_S = np.bincount(self.source_P[:rest], minlength=len(self.places_S))
        return whole * self.places_S + some_S


@cache
def _pattern(weights: tuple[float, ...]) -> _Pattern:
    places_S = np.array(places_of(weights), dtype=np.int64)
    source_P = np.repeat(np.arange(len(places_S)), places_S)
    before_P = np.concatenate([np.arange(count) for count in places_S])
    # Place k of a source with n of them stands at (k + 1/2) / n of the pattern.
    order_P = np.argsort((before_P + 0.5) / places_S[source_P], kind="stable")
    return _Pattern(source_P=source_P[order_P], before_P=before_P[order_P], places_S=places_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Say from which source each sequence of each step comes; the last phase has no end."""

    phases: tuple[MixturePhase, ...]

    def sequences(self, *, step: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (source_B, number_B) of step `step` (from 0) with `count` sequences.

        `number` counts the sequences that the source gave before, over all steps of the run.
        """
        given_S = np.zeros(len(self.phases[0].weights), dtype=np.int64)
        start = 0
        for phase in self.phases:
            pattern = _pattern(phase.weights)
            if phase.until_step is None or step < phase.until_step:
                place_B = (step - start) * count + np.arange(count, dtype=np.int64)
                whole_B, rest_B = place_B // MIXTURE_PLACES, place_B % MIXTURE_PLACES
                source_B = pattern.source_P[rest_B]
                number_B = whole_B * pattern.places_S[source_B] + pattern.before_P[rest_B]
                return source_B, number_B + given_S[source_B]
            given_S += pattern.first((phase.until_step - start) * count)
            start = phase.until_step
        raise AssertionError("the last phase has no end")

    def given(self, *, steps: int, count: int) -> NDArray[np.int64]:
        """Return how many sequences each source gives in the first `steps` steps."""
        given_S = np.zeros(len(self.phases[0].weights), dtype=np.int64)
        start = 0
        for phase in self.phases:
            end = steps if phase.until_step is None else min(steps, phase.until_step)
            if end > start:
                given_S += _pattern(phase.weights).first((end - start) * count)
                start = end
        return given_S

    def most_in_a_step(self, count: int) -> NDArray[np.int64]:
        """Return the most sequences of one step that each source may give, of `count`."""
        shares = np.array([places_of(phase.weights) for phase in self.phases]).max(axis=0)
        return -(-shares * count // MIXTURE_PLACES)


def shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Return weights so that they add up to one."""
    total = sum(weights)
    return tuple(weight / total for weight in weights)
