"""Which samples each rank reads: the share of one global batch.

Shape suffixes: B sequences, T positions.

The samples of a step are one list (`sampling.py`). Data-parallel rank r of dp reads microbatch m of
M, b sequences each, at positions [(r M + m) b, (r M + m + 1) b): a contiguous share of the list
for each rank. All tensor, pipeline and context ranks of one data-parallel rank read the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.core.attention_mask import DocumentStarts
from echelon.core.plan import Plan
from echelon.train.data.dataset import TokenDataset
from echelon.train.data.sampling import sample_ids, sequential_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Say how a global batch is cut: dp x num_microbatches x microbatch_sequences."""

    dp: int
    num_microbatches: int
    microbatch_sequences: int
    sequence_length: int
    separate_documents: bool = False

    @classmethod
    def of_plan(cls, plan: Plan) -> BatchLayout:
        """Return the layout that `plan` states."""
        return cls(
            dp=plan.mesh.dp,
            num_microbatches=plan.num_microbatches,
            microbatch_sequences=plan.layout.microbatch_sequences,
            sequence_length=plan.mathematics.sequence_length,
            separate_documents=plan.mathematics.documents == "separate",
        )

    @property
    def global_sequences(self) -> int:
        """Return the sequences of a global batch."""
        return self.dp * self.num_microbatches * self.microbatch_sequences

    def positions(self, *, dp_rank: int, microbatch: int) -> slice:
        """Return which positions of the step's sample list this microbatch is."""
        assert 0 <= dp_rank < self.dp
        assert 0 <= microbatch < self.num_microbatches
        first = (dp_rank * self.num_microbatches + microbatch) * self.microbatch_sequences
        return slice(first, first + self.microbatch_sequences)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """Hold the tokens of one microbatch, int64; labels are shifted, -100 where not counted.

    `documents` says where documents start, where attention stays inside of them. All positions are
    here: a context rank takes its own.
    """

    inputs_BT: NDArray[np.int64]
    labels_BT: NDArray[np.int64]
    sample_ids_B: NDArray[np.int64]
    documents: DocumentStarts | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GlobalBatch:
    """Hold the sample ids of one step and read any share of it.

    `num_valid` is the number of labels that count in the whole batch, the one denominator of the
    loss; every rank has it without a message.
    """

    dataset: TokenDataset
    layout: BatchLayout
    sample_ids: NDArray[np.int64]

    @property
    def num_valid(self) -> int:
        """Return the number of labels that count, over all ranks and microbatches."""
        return self.dataset.count_valid(self.sample_ids, self.layout.sequence_length)

    def microbatch(self, *, dp_rank: int, microbatch: int) -> Microbatch:
        """Read what data-parallel rank `dp_rank` computes as its microbatch `microbatch`."""
        positions = self.layout.positions(dp_rank=dp_rank, microbatch=microbatch)
        ids = self.sample_ids[positions]
        inputs_BT, labels_BT = self.dataset.read(ids, self.layout.sequence_length)
        documents = None
        if self.layout.separate_documents:
            documents = self.dataset.document_starts(inputs_BT)
        return Microbatch(
            inputs_BT=inputs_BT, labels_BT=labels_BT, sample_ids_B=ids, documents=documents
        )


def training_batch(
    dataset: TokenDataset, layout: BatchLayout, *, seed: int, step: int
) -> GlobalBatch:
    """Return the global batch of `step` (from 0): the same samples under every layout."""
    ids = sample_ids(
        seed=seed,
        step=step,
        num_samples=dataset.num_samples(layout.sequence_length),
        count=layout.global_sequences,
    )
    return GlobalBatch(dataset=dataset, layout=layout, sample_ids=ids)


def validation_batch(dataset: TokenDataset, layout: BatchLayout, *, batch: int) -> GlobalBatch:
    """Return batch `batch` of a pass over the validation part: in order, each token once."""
    assert 0 <= batch < num_validation_batches(dataset, layout)
    ids = sequential_ids(batch=batch, count=layout.global_sequences)
    return GlobalBatch(dataset=dataset, layout=layout, sample_ids=ids)


def num_validation_batches(dataset: TokenDataset, layout: BatchLayout) -> int:
    """Return how many global batches one pass over the validation part takes."""
    return -(-dataset.num_samples(layout.sequence_length) // layout.global_sequences)
