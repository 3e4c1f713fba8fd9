# SPDX-License-Identifier: Apache-2.0
"""What is read, and by which rate it is learnt: the proof's own batches, and those of the trainer.

The batches of a proof are made up, so they are held to what they must be, not to other made-up
ones. What the trainer reads is compared with its definition. It is loaded by its name, as a subject
is: a proof imports no training. It reads a text that is short enough for an epoch to end within the
steps, and whose last sample is not full.

Shape suffixes: B sequences, T positions.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from echelon.core.plan import Plan
from echelon.core.settings.list_types import MixturePhase
from echelon.proof.claims.checks import Check, exact_check
from echelon.proof.evidence.evidence import FLOAT64_TOLERANCE
from echelon.proof.independent.optimizers import rate_of
from echelon.proof.independent.samples import (
    ReadRow,
    Source,
    mixed_samples,
    read_row,
    samples_of_step,
)
from echelon.proof.oracle import oracle
from echelon.proof.oracle.batches import overflow_steps
from echelon.proof.subject import ProofBatch

SAMPLE_ORDER = "order of samples"
TOKENS = "token batch"
LABELS = "labels"
DOCUMENTS = "document starts"
COUNT = "count of tokens"

_SAMPLES_BESIDE_A_STEP = 3  # samples of the text, beyond those of one step
_END = 0  # the token id that ends a document
_PHASES = ((0.7, 0.3, 0.0), (0.2, 0.3, 0.5))
"""Weights of the sources of a mixture, in each of its phases."""
_MIXTURE = "of a mixture: "


def proof_batches(plan: Plan, batches: Sequence[ProofBatch]) -> Iterator[Check]:
    """Hold the proof's own batches to what they must be, step by step."""
    ids = [sample for batch in batches for sample in batch.sample_ids]
    again = sorted({sample for sample in ids if ids.count(sample) > 1})
    yield exact_check(0, SAMPLE_ORDER, f"samples {again[:4]} come twice" * bool(again))
    for step, batch in enumerate(batches):
        # Those that are to overflow have few tokens on purpose, over and over.
        loud = step in overflow_steps(plan)
        yield exact_check(step, TOKENS, _tokens_problem(plan, batch, loud=loud), 1)
        yield exact_check(step, LABELS, "" if loud else _labels_problem(batch), 2)
        yield exact_check(step, DOCUMENTS, _documents_problem(plan, batch), 3)


def _tokens_problem(plan: Plan, batch: ProofBatch, *, loud: bool) -> str:
    """Return what is wrong with the tokens of a batch."""
    mathematics = plan.mathematics
    wanted = [mathematics.global_sequences, mathematics.sequence_length]
    if list(batch.inputs_BT.shape) != wanted or len(batch.sample_ids) != wanted[0]:
        return f"{list(batch.inputs_BT.shape)} tokens instead of {wanted}"
    rows = [tuple(row) for row in batch.inputs_BT.tolist()]
    if not all(0 <= token < plan.model.vocab for row in rows for token in row):
        return f"a token is not below the vocabulary of {plan.model.vocab}"
    return "two sequences are the same" * (len(set(rows)) < len(rows) and not loud)


def _labels_problem(batch: ProofBatch) -> str:
    """Return where a label is not the token that comes next."""
    pairs = zip(batch.inputs_BT.tolist(), batch.labels_BT.tolist(), strict=True)
    for row, (tokens, labels) in enumerate(pairs):
        for t, (label, following) in enumerate(zip(labels[:-1], tokens[1:], strict=True)):
            if label not in (-100, following):
                return f"that of position {t} of row {row} is {label}, {following} comes next"
    return "" if (batch.labels_BT != -100).any() else "no label counts"


def _documents_problem(plan: Plan, batch: ProofBatch) -> str:
    """Return what is wrong with where documents start."""
    length, separate = plan.mathematics.sequence_length, plan.mathematics.documents == "separate"
    if batch.documents is None or not separate:
        told = {True: "separate", False: "joined"}[batch.documents is not None]
        return f"documents are {told}" * (separate is (batch.documents is None))
    for starts in batch.documents:
        if starts[0] != 0 or sorted({*starts}) != list(starts) or starts[-1] >= length:
            return f"{starts} are not the starts of documents in {length} positions"
    return "" if len(batch.documents) == len(batch.sample_ids) else "a sequence has none"


def trainer_batches(plan: Plan, num_steps: int) -> Iterator[Check]:
    """Compare every row that the trainer reads in `num_steps` steps, and in a validation pass."""
    batches: Any = importlib.import_module("echelon.training.data.batches")
    text, mathematics = _text(plan), plan.mathematics
    length, count = mathematics.sequence_length, mathematics.global_sequences
    dataset, layout = _dataset(plan, text), batches.BatchLayout.from_plan(plan)
    num_samples = -(-(len(text) - 1) // length)
    for step in range(num_steps):
        batch = batches.training_batch(dataset, layout, seed=mathematics.seed, step=step)
        ids = samples_of_step(mathematics.seed, step, count, num_samples)
        yield from _batch(plan, batch, [read_row(text, i, length, _END) for i in ids], step)
    for number in range(batches.num_validation_batches(dataset, layout)):
        batch = batches.validation_batch(dataset, layout, batch=number)
        ids = range(number * count, (number + 1) * count)
        rows = [read_row(text, i, length, _END) for i in ids]
        yield from _batch(plan, batch, rows, num_steps + number)


def mixed_batches(plan: Plan, num_steps: int) -> Iterator[Check]:
    """Compare every row that the trainer reads of a mixture of three, whose weights change once.

    The last source is as short as a step, so that an epoch of it ends.
    """
    batches: Any = importlib.import_module("echelon.training.data.batches")
    mathematics = plan.mathematics
    length, count = mathematics.sequence_length, mathematics.global_sequences
    texts = [_text(plan, place) for place in range(len(_PHASES[0]))]
    ends = (max(1, num_steps // 2), None)
    dataset, layout = _mixture(plan, texts, ends), batches.BatchLayout.from_plan(plan)
    sizes = [-(-(len(text) - 1) // length) for text in texts]
    sources = [Source(hash=_hash(place), num_samples=size) for place, size in enumerate(sizes)]
    rows = [
        replace(row, sample=place)
        for place, row in enumerate(
            read_row(text, i, length, _END)
            for text, size in zip(texts, sizes, strict=True)
            for i in range(size)
        )
    ]
    phases = list(zip(ends, _PHASES, strict=True))
    steps = mixed_samples(mathematics.seed, num_steps, count, sources, phases)
    for step, ids in enumerate(steps):
        batch = batches.training_batch(dataset, layout, seed=mathematics.seed, step=step)
        yield from _batch(plan, batch, [rows[i] for i in ids], step, _MIXTURE)
    for number in range(batches.num_validation_batches(dataset, layout)):
        batch = batches.validation_batch(dataset, layout, batch=number)
        ids = range(number * count, (number + 1) * count)
        beyond = (replace(read_row((), 0, length, _END), sample=i) for i in ids[len(rows) :])
        found = [*rows[ids.start : ids.stop], *beyond]
        yield from _batch(plan, batch, found, num_steps + number, _MIXTURE)


def learning_rates(plan: Plan) -> Iterator[Check]:
    """Compare the rates of the oracle and of the trainer in every step, and beyond the last."""
    engine: Any = importlib.import_module("echelon.training.optimizer.step")
    settings = plan.mathematics.optimizer
    for step in range(settings.total_steps + 2):
        right = rate_of(settings, step)
        for position, (whose, formula) in enumerate(
            # Looked up now: it is what the oracle multiplies by.
            (("oracle", oracle.learning_rate), ("trainer", engine.learning_rate))
        ):
            found = float(formula(settings, step))
            yield Check(
                step,
                f"learning rate of the {whose}",
                abs(found - right) / settings.learning_rate,
                allowed=FLOAT64_TOLERANCE,
                detail=f"{found:.10g} instead of {right:.10g}",
                position=position,
            )


def _batch(plan: Plan, batch: Any, rows: list[ReadRow], step: int, of: str = "") -> Iterator[Check]:
    """Compare a global batch, microbatch by microbatch, with its rows in order."""
    separate = plan.mathematics.documents == "separate"
    size, per_rank = plan.layout.microbatch_sequences, plan.num_microbatches
    valid = sum(label != -100 for row in rows for label in row.labels)
    problem = f"{of}{batch.num_valid} tokens count instead of {valid}" * (batch.num_valid != valid)
    yield exact_check(step, COUNT, problem, len(rows))
    for number in range(len(rows) // size):
        rank, microbatch = divmod(number, per_rank)
        read, wanted = (
            batch.microbatch(dp_rank=rank, microbatch=microbatch),
            rows[number * size : (number + 1) * size],
        )
        pairs: list[tuple[str, object, object]] = [
            (SAMPLE_ORDER, read.sample_ids_B.tolist(), [row.sample for row in wanted]),
            (TOKENS, read.inputs_BT.tolist(), [row.tokens for row in wanted]),
            (LABELS, read.labels_BT.tolist(), [row.labels for row in wanted]),
        ]
        if separate:
            pairs.append((DOCUMENTS, read.documents, tuple(row.documents for row in wanted)))
        for position, (what, found, right) in enumerate(pairs):
            where = f"{of}dp {rank} microbatch {microbatch}"
            problem = f"{where} has {found} instead of {right}" * (found != right)
            yield exact_check(step, what, problem, position)


def _text(plan: Plan, place: int = 0) -> list[int]:
    """Return the tokens of documents of unequal lengths; later texts of a mixture are shorter."""
    mathematics = plan.mathematics
    num_samples = mathematics.global_sequences + _SAMPLES_BESIDE_A_STEP - place
    count = num_samples * mathematics.sequence_length - mathematics.sequence_length // 2
    random = np.random.default_rng(mathematics.seed + place)
    tokens = random.integers(1, plan.model.vocab, size=count)
    tokens[::5] = _END
    tokens[1::15] = _END
    return tokens.tolist()


def _mixture(plan: Plan, texts: Sequence[list[int]], ends: Sequence[int | None]) -> Any:
    """Return texts as the trainer holds a mixture of them."""
    module: Any = importlib.import_module("echelon.training.data.mixed_dataset")
    parts = tuple(_dataset(plan, text, _hash(place)) for place, text in enumerate(texts))
    pairs = zip(ends, _PHASES, strict=True)
    phases = tuple(MixturePhase(until_step=end, weights=weights) for end, weights in pairs)
    return module.MixedDataset(
        path=Path("a made-up mixture"),
        names=tuple(part.index.hash for part in parts),
        parts=parts,
        mixture=module.Mixture(phases=phases),
        index=parts[0].index,
    )


def _hash(place: int) -> str:
    return f"{place:064x}"


def _dataset(plan: Plan, text: list[int], hash_: str = "") -> Any:
    """Return the text as the trainer holds it, in two shards."""
    module: Any = importlib.import_module("echelon.training.data.dataset")
    tokens, half = np.array(text), len(text) // 2
    return module.TokenDataset(
        path=Path("a made-up text"),
        index=SimpleNamespace(
            tokenizer=SimpleNamespace(end_of_document=_END),
            max_token=plan.model.vocab - 1,
            answers=None,
            hash=hash_,
        ),
        start=0,
        stop=len(text),
        _shards=(tokens[:half], tokens[half:]),
        _shard_starts=np.array([0, half, len(text)]),
    )
