# SPDX-License-Identifier: Apache-2.0
"""Made-up global batches, a function of (seed, step): each rank and the oracle make the same.

No two microbatches have the same tokens, and, as far as the lengths allow, no two have the same
number of valid tokens: then a mean of means, a swapped microbatch, or the same data on two
replicas gives other numbers.

Where a dynamic loss scale is to overflow (`proof/oracle/optimizers.py`), some steps are *loud*:
one token over and over, always to be followed by the same other one; their gradients add up to a
larger norm than those of other steps.

Where experts drop tokens by score, no two tokens of a sequence may score the same: which of them
is dropped would be a matter of rounding. Tokens that have met nothing but their like score so,
whatever their positions (attention to equal values is that value): the second of two equal ones at
the start of a document, or two documents that start alike. So neighbours differ there, and starts.
Of positions that see no further back than a window, two that end in the same tokens score the same:
there no two neighbours are the same pair either.

Shapes: B sequences of the whole global batch, T positions, K microbatches of all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from echelon.core.attention_mask import DocumentStarts
from echelon.core.plan import Plan
from echelon.layout.islands import whole_batch_plan
from echelon.models.batch import IGNORED_LABEL
from echelon.proof.subject import ProofBatch

_SAMPLES_PER_STEP = 10_007  # numbers of samples
_MIN_VALID_SHARE = 0.3  # of the tokens of a sample

OVERFLOWING_SCALE = 2.0**256
"""A loss scale from here on says that some steps are to overflow float64."""


def global_batch(plan: Plan, step: int) -> ProofBatch:
    """Return the batch of `step`: distinct sample ids, random tokens, uneven valid labels.

    An island of local SGD has its rows of the batch of all.
    """
    mathematics = plan.mathematics
    if mathematics.local_sgd.is_part:
        first = mathematics.local_sgd.island * mathematics.global_sequences
        every = global_batch(whole_batch_plan(plan), step)
        return every.rows(slice(first, first + mathematics.global_sequences))
    length, sequences = mathematics.sequence_length, mathematics.global_sequences
    generator = np.random.default_rng([mathematics.seed, step])
    tokens = generator.integers(0, plan.model.vocab, size=(sequences, length + 1))
    # The largest id lies beside the padding of the last vocabulary shard: it must be met.
    tokens[0, 0] = tokens[-1, -1] = plan.model.vocab - 1
    if step in overflow_steps(plan):
        tokens[:, :] = plan.model.vocab - 1
    documents = _documents(plan, step) if mathematics.documents == "separate" else None
    if mathematics.balance.capacity_factor is not None and mathematics.balance.drop == "score":
        # Steps that overflow repeat one token on purpose; nothing comes of where it goes.
        pairs = plan.model.window is not None and step not in overflow_steps(plan)
        for row, sequence in enumerate(tokens):
            starts = (0,) if documents is None else documents[row]
            _make_distinct(sequence, starts, plan.model.vocab, pairs=pairs)
    labels = tokens[:, 1:].copy()
    if step in overflow_steps(plan):
        labels[:] = 0
    _ignore(labels, valid_counts(plan), generator)
    ids = step * _SAMPLES_PER_STEP + generator.permutation(_SAMPLES_PER_STEP)[:sequences]
    return ProofBatch(
        sample_ids=tuple(int(i) for i in ids),
        inputs_BT=torch.from_numpy(tokens[:, :-1].copy()),
        labels_BT=torch.from_numpy(labels),
        documents=documents,
    )


def _documents(plan: Plan, step: int) -> DocumentStarts:
    """Return where documents start: two to four in a sequence, of very unequal lengths."""
    mathematics = plan.mathematics
    length = mathematics.sequence_length
    generator = np.random.default_rng([mathematics.seed, step, 1])
    found: list[tuple[int, ...]] = []
    for _ in range(mathematics.global_sequences):
        cuts = length * generator.random(generator.integers(1, 4)) ** 3
        found.append(tuple(sorted({0, *(min(1 + int(cut), length - 1) for cut in cuts)})))
    return tuple(found)


def _make_distinct(sequence: np.ndarray, starts: Sequence[int], vocab: int, *, pairs: bool) -> None:
    """Change tokens until neighbours differ, and the first ones of documents, and all `pairs`.

    Where a small vocabulary has too few pairs for all, some are there twice.
    """
    first: set[int] = set()
    met: set[tuple[int, int]] = set()
    for position in range(len(sequence)):
        last = int(sequence[position - 1]) if position else -1
        taken = {last} | (first if position in starts else set[int]())
        tried = {(int(sequence[position]) - back) % vocab: None for back in range(vocab)}
        left = [token for token in tried if token not in taken]
        unmet = [token for token in left if (last, token) not in met] if pairs else left
        sequence[position] = (unmet or left)[0]
        met.add((last, int(sequence[position])))
        first |= {int(sequence[position])} if position in starts else set()


def overflow_steps(plan: Plan) -> range:
    """Return the steps that are to overflow: as many as a dynamic loss scale falls after.

    There are some where the scale is one that no training has.
    """
    precision = plan.mathematics.precision
    if precision.loss_scaling != "dynamic" or precision.loss_scale < OVERFLOWING_SCALE:
        return range(0)
    return range(1, 1 + precision.loss_scale_hysteresis)


def valid_counts(plan: Plan) -> list[int]:
    """Return the valid tokens of each microbatch, replicas outermost: falling from nearly all.

    The fall is even over all K microbatches, so the sums of two replicas differ too.
    """
    positions = plan.layout.microbatch_sequences * plan.mathematics.sequence_length
    count = plan.mathematics.global_sequences // plan.layout.microbatch_sequences
    most, least = positions - 1, max(1, round(_MIN_VALID_SHARE * positions))
    return [round(most - (most - least) * k / max(1, count - 1)) for k in range(count)]


def _ignore(labels_BT: np.ndarray, counts: list[int], generator: np.random.Generator) -> None:
    """Put the ignored label at random places until each microbatch has its count of valid ones."""
    for labels, count in zip(np.split(labels_BT, len(counts)), counts, strict=True):
        places = generator.permutation(labels.size)[count:]
        labels.reshape(-1)[places] = IGNORED_LABEL
