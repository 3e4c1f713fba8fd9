# SPDX-License-Identifier: Apache-2.0
"""The data of a run as its `[data]` says it: rows of the trainer, compared with its records.

The trainer's loop delivers some batches on one rank (`training/delivered.py`), each source cut to
its first megabyte, phases of a mixture to two steps. The independent reader has the same rows from
the records (`proof/independent/records.py`) in the order of `proof/independent/samples.py`. Tokens,
labels, answers, documents, and the sizes of both parts must be equal. Data on another machine is
reported as not proven.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from echelon.config.job import DataSettings
from echelon.core.messages.notes import PROGRESS
from echelon.core.piece_sizes import PROOF_PIECES
from echelon.core.plan import Plan
from echelon.core.rulebook.prove import PROVE_DATA
from echelon.core.serialize import to_json
from echelon.core.settings.list_types import phases_of, sources_of
from echelon.layout.islands import without_losses
from echelon.proof.claims.checks import Check, exact_check
from echelon.proof.claims.claims import judged
from echelon.proof.independent.records import SourceText, Tokens, read_source
from echelon.proof.independent.samples import ReadRow, Source, mixed_samples, samples_of_step
from echelon.proof.replays.runs import RankRunner
from echelon.proof.shrink import shrink
from echelon.proof.verdict import ProofPass
from echelon.proof.whole_run.one_device import pass_of

DELIVER = "echelon.training.delivered:deliver"
"""The function of the trainer that a rank calls."""
MAX_BYTES = 2**20
"""Bytes of text that are read of each source."""
_PHASE_STEPS = 2  # steps of each phase of a mixture
_SEARCHED = 4 * MAX_BYTES
"""Tokens of a part in which the tokens of a wrong row are looked for."""
_STRETCH = 1000
"""Tokens of a part that are compared together; no size of a file is a multiple of it."""
_LEAST_HELD_OUT = 0.01  # of a source: a run may hold out less than a megabyte has
_PARTS, _TRAINING, _VALIDATION, _TEXTS = (
    "tokens of each source, and of its held-out part",
    "rows that training reads: samples, tokens, labels, documents",
    "rows that validation reads",
    "documents and tokens of both parts, from end to end",
)


def data_pass(
    plan: Plan, data: DataSettings, *, run_ranks: RankRunner, deliver: str = DELIVER
) -> ProofPass:
    """Prove the data of a run; if it is not here, return a pass without claims, and the reason."""
    if reason := why_not_here(data):
        note = f"data not found here: not proven ({reason})"
        return ProofPass(precision="tokens", claims=(), diagnosis=None, note=note)
    PROGRESS.info("the data of the run, read from its records")
    excerpt, small = excerpted(data), shrink(without_losses(plan), precision="fp64")
    with tempfile.TemporaryDirectory(prefix="echelon-prove-") as folder:
        argument = {
            "folder": folder,
            "plan": small.to_json(),
            "data": to_json(excerpt),
            "length": plan.mathematics.sequence_length,
            "max_bytes": MAX_BYTES,
            "most_tokens": _SEARCHED,
            "stretch": _STRETCH,
        }
        run_ranks(deliver, argument, 1, labels=[""])
        delivered = json.loads((Path(folder) / "delivered.json").read_text(encoding="utf-8"))
        run = OwnData(plan=small, data=excerpt, delivered=delivered)
        claims = (
            judged(PROVE_DATA, _PARTS, list(run.part_checks())),
            judged(PROVE_DATA, _TRAINING, list(run.training_checks())),
            judged(PROVE_DATA, _VALIDATION, list(run.validation_checks())),
            judged(PROVE_DATA, _TEXTS, list(run.text_checks())),
        )
    names = ", ".join(run.names)
    note = f"{names}: sequences of {run.length} tokens, from the first {MAX_BYTES:,} bytes"
    return pass_of("tokens", claims, note=note)


def why_not_here(data: DataSettings) -> str:
    """The reason why data cannot be read here; empty if it can."""
    names = sources_of(data.mixture) if data.mixture else (data.source,)
    for name in names:
        if "://" in name:
            return f"{name} is read over a network"
        if name != "stdlib" and not Path(name).exists():
            return f"there is no {name}"
    made = data.tokenizer == "bytes" or data.tokenizer.startswith("bpe-")
    if not made and not Path(data.tokenizer).exists():
        return f"there is no tokenizer {data.tokenizer}"
    if data.train_on == "answers" and find_spec("transformers") is None:
        return "templates of chats are rendered by transformers, which is not installed"
    return ""


def excerpted(data: DataSettings) -> DataSettings:
    """The settings with phases of two steps each, and a held-out part of at least 1%."""
    ends = [phase.until_step for phase in phases_of(data.mixture)] if data.mixture else []
    early = {end: _PHASE_STEPS * place for place, end in enumerate(ends, 1) if end is not None}
    mixture = tuple(
        part if part.until_step is None else replace(part, until_step=early[part.until_step])
        for part in data.mixture
    )
    fraction = data.validation_fraction and max(data.validation_fraction, _LEAST_HELD_OUT)
    return replace(data, mixture=mixture, validation_fraction=fraction)


@dataclass(frozen=True, kw_only=True)
class OwnData:
    """The rows that the trainer delivered, and the records of the same data."""

    plan: Plan
    data: DataSettings
    delivered: Mapping[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        """The sources, in their order."""
        return sources_of(self.data.mixture) if self.data.mixture else (self.data.source,)

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.delivered["length"]

    @cached_property
    def texts(self) -> Sequence[SourceText]:
        """The text of each source, from its records."""
        chats, end = self.data.train_on == "answers", self.delivered["end"]
        own = Path(self.delivered["tokenizer"]) if self.delivered["tokenizer"] else None
        tokenizer = Path(self.data.tokenizer)
        if own is not None and self.data.tokenizer.startswith("bpe-"):
            tokenizer = own  # it was trained on these texts
        file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
        piece = PROOF_PIECES.text_bytes
        tokens = Tokens(file=None if own is None else file, end=end, piece_bytes=piece)
        return [read_source(name, tokens, chats=chats, max_bytes=MAX_BYTES) for name in self.names]

    @cached_property
    def parts(self) -> tuple[Sequence[SourceText], Sequence[SourceText]]:
        """The training part and the held-out part of each source."""
        fraction = self.data.validation_fraction
        if not fraction:
            return self.texts, self.texts
        pairs = [text.split(fraction) for text in self.texts]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    def part_checks(self) -> Iterator[Check]:
        """Compare the sizes of both parts of each source."""
        for part, given, text, position in self._each_part():
            size, right = given["num_tokens"], text.num_tokens
            problem = f"{size:,} tokens instead of {right:,}" * (size != right)
            if problem and (wrong := _wrong_document(given["documents"], text)):
                problem += f": {wrong}"
            yield exact_check(0, part, problem, position)

    def text_checks(self) -> Iterator[Check]:
        """Compare the documents and tokens of both parts of each source."""
        for part, given, text, position in self._each_part():
            wrong = _wrong_document(given["documents"], text)
            yield exact_check(0, part, wrong or _wrong_stretch(given["sums"], text), position)

    def _each_part(self) -> Iterator[tuple[str, Mapping[str, Any], SourceText, int]]:
        kinds = zip(("training", "validation"), self.parts, self.delivered["parts"], strict=True)
        for position, (kind, right, delivered) in enumerate(kinds):
            for name, text, given in zip(self.names, right, delivered, strict=True):
                yield f"{kind} part of {name}", given, text, position

    def training_checks(self) -> Iterator[Check]:
        """Compare the rows of each step, and the tokens that count in it."""
        steps = {int(step): batch for step, batch in self.delivered["training"].items()}
        samples = self._samples(max(steps) + 1)
        for step, batch in steps.items():
            right = [self._row(0, sample) for sample in samples[step]]
            counted = sum(label != -100 for row in right for label in row.labels)
            problem = f"{batch['num_tokens']} tokens count instead of {counted}"
            problem *= batch["num_tokens"] != counted
            yield exact_check(step, "tokens that count", problem, len(right))
            yield from self._row_checks(0, step, batch["rows"], right)

    def validation_checks(self) -> Iterator[Check]:
        """Compare the rows of the first and the last batch of the held-out part."""
        size = self.plan.mathematics.global_sequences
        for number, batch in self.delivered["validation"].items():
            first = int(number) * size
            right = [self._row(1, sample) for sample in range(first, first + size)]
            yield from self._row_checks(1, int(number), batch["rows"], right)

    def _samples(self, num_steps: int) -> list[list[int]]:
        """The samples of each step, numbered one source after the other."""
        seed, size = self.plan.mathematics.seed, self.plan.mathematics.global_sequences
        counts = [text.num_samples(self.length) for text in self.parts[0]]
        if not self.data.mixture:
            pad = self.data.epoch_end == "pad"
            return [
                samples_of_step(seed, step, size, counts[0], pad=pad) for step in range(num_steps)
            ]
        sources = [
            Source(hash=hash_, num_samples=count)
            for hash_, count in zip(self.delivered["sources"], counts, strict=True)
        ]
        phases = [(phase.until_step, phase.weights) for phase in phases_of(self.data.mixture)]
        return list(mixed_samples(seed, num_steps, size, sources, phases))

    def _source(self, part: int, sample: int) -> tuple[int, int]:
        """The source of a sample, and its number there; the last source for samples past it."""
        for source, text in enumerate(self.parts[part][:-1]):
            count = text.num_samples(self.length)
            if sample < count:
                return source, sample
            sample -= count
        return len(self.names) - 1, sample

    def _row(self, part: int, sample: int) -> ReadRow:
        source, number = self._source(part, sample)
        answers_only = self.data.train_on == "answers"
        text, end = self.parts[part][source], self.delivered["end"]
        row = text.row(number, self.length, end, answers_only=answers_only)
        return replace(row, sample=sample)

    def _row_checks(
        self, part: int, step: int, rows: Sequence[Mapping[str, Any]], right: Sequence[ReadRow]
    ) -> Iterator[Check]:
        lacking = f"{len(rows)} rows instead of {len(right)}" * (len(rows) != len(right))
        yield exact_check(step, "rows of the batch", lacking, -1)
        separate = self.plan.mathematics.documents == "separate"
        for position, (row, wanted) in enumerate(zip(rows, right, strict=False)):
            problem = self._problem(part, row, wanted, separate=separate)
            source, number = self._source(part, wanted.sample)
            subject = f"sample {number} of {self.names[source]}, row {position}"
            yield exact_check(step, subject, problem, position)

    def _problem(
        self, part: int, row: Mapping[str, Any], wanted: ReadRow, *, separate: bool
    ) -> str:
        """The mistake of a row; empty without one."""
        if row["tokens"] != wanted.tokens:
            return self._wrong_tokens(part, row["tokens"], wanted)
        if row["labels"] != wanted.labels:
            return _wrong_labels(row["labels"], wanted.labels)
        if separate and tuple(row["documents"] or ()) != wanted.documents:
            return f"documents start at {row['documents']} instead of {list(wanted.documents)}"
        if row["sample"] != wanted.sample:
            return f"its number is {row['sample']} instead of {wanted.sample}"
        return ""

    def _wrong_tokens(self, part: int, tokens: Sequence[int], wanted: ReadRow) -> str:
        """Name the source of the wrong tokens of a row, or the first wrong token."""
        for place, name in enumerate(self.names):
            for kind, texts in (("training", self.parts[0]), ("held-out", self.parts[1])):
                start = _start_of(tokens, texts[place])
                if start is None:
                    continue
                sample, inside = divmod(start, self.length)
                if inside == 0:
                    return f"it is sample {sample} of the {kind} part of {name}"
                own, first = self._source(part, wanted.sample)
                late = start - first * self.length
                same = own == place and kind == ("training", "held-out")[part]
                if same and abs(late) < self.length:
                    return f"it begins {late:+d} tokens from where it must"
                return f"it begins at token {start} of the {kind} part of {name}"
        pairs = enumerate(zip(tokens, wanted.tokens, strict=False))
        position, (wrong, right) = next((p, pair) for p, pair in pairs if pair[0] != pair[1])
        return f"token {position} is {wrong} instead of {right}"


def _wrong_document(lengths: Sequence[int] | None, text: SourceText) -> str:
    """The first document of a part with other tokens than its record; empty without one."""
    pairs = zip_longest(lengths or (), text.documents() if lengths else (), fillvalue=0)
    wrong = ((n, *pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
    texts = (f"document {n} has {size:,} tokens instead of {right:,}" for n, size, right in wrong)
    return next(texts, "")


def _wrong_stretch(sums: Sequence[int], text: SourceText) -> str:
    """The first stretch of a part with other tokens than its records; empty without one."""
    for number, given in enumerate(sums):
        first = text.start + number * _STRETCH
        tokens = np.asarray(text.tokens[first : min(first + _STRETCH, text.stop)], dtype="<u4")
        if crc32(tokens.tobytes()) != given:
            first -= text.start
            return f"tokens {first:,} to {first + len(tokens) - 1:,} are others"
    return ""


def _start_of(tokens: Sequence[int], text: SourceText) -> int | None:
    """The first place of tokens in a text; None if it has none."""
    searched = text.tokens[text.start : min(text.stop, text.start + _SEARCHED)]
    size = len(tokens)
    head = list(tokens)
    for start in range(len(searched) - size + 1):
        if searched[start] == head[0] and list(searched[start : start + size]) == head:
            return start
    return None


def _wrong_labels(rows: Sequence[int], right: Sequence[int]) -> str:
    """The first difference of labels: whether they count, or their ids."""
    counts, wanted = ([label != -100 for label in labels] for labels in (rows, right))
    if counts != wanted:
        for shift in (1, -1):
            moved = [False, *wanted[:-1]] if shift == 1 else [*wanted[1:], False]
            # The end of a row may have another neighbour.
            if counts[1:-1] == moved[1:-1]:
                return f"the labels that count are shifted by {shift:+d}"
        position = next(
            p for p, pair in enumerate(zip(counts, wanted, strict=True)) if pair[0] != pair[1]
        )
        does = {True: "counts", False: "does not count"}
        return (
            f"label {position} {does[counts[position]]}, and {does[wanted[position]]} by its record"
        )
    position = next(p for p, pair in enumerate(zip(rows, right, strict=True)) if pair[0] != pair[1])
    return f"label {position} is {rows[position]} instead of {right[position]}"
