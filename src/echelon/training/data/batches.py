# SPDX-License-Identifier: Apache-2.0
"""Which samples a step reads, and which of them each rank: nothing depends on the world size.

An epoch is a permutation of all samples without replacement. Sample number `p` of the run is
entry `p % num_samples` of the permutation of epoch `p // num_samples`, and step N takes numbers
N * count to (N + 1) * count, so a step may straddle epochs, and a run resumes anywhere from its
step alone. Nothing is dropped: the next epoch begins in the same step. With `data.epoch_end =
"pad"` each epoch begins with a step of its own: the last batch of one is filled with the samples
that it began with, as a sampler that pads to a multiple of the ranks does (10 samples in batches
of 4, one on each of 4 ranks: 2 are read twice).

The permutation is a keyed bijection, a Feistel network on the bits of the index with cycle-walking
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), so a step costs O(count) time
and no memory, whatever the number of samples. The mixing function is SplitMix64's finaliser.

Data-parallel rank r of dp reads microbatch m of M, b sequences each, at positions
[(r M + m) b, (r M + m + 1) b) of the list of a step: a contiguous share for each rank. All tensor,
pipeline and context ranks of one data-parallel rank read the same.

Shape suffixes: B sequences, T positions, R rounds, N samples.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echelon.config.job import EpochEnd
from echelon.core.attention_mask import DocumentStarts
from echelon.core.plan import Plan
from echelon.training.data.mixed_dataset import AnyDataset, MixedDataset

_ROUNDS = 12  # rounds of a Feistel network
# Round functions of one to five bits mix slowly: with 12 rounds the permutations of 7 samples are
# measurably uneven, with 32 they pass a chi-square test over all 5040.
_ROUNDS_SMALL = 32
_SMALL_BITS = 12  # bits of a number of samples
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1 = np.uint64(30)
_SHIFT_2 = np.uint64(27)
_SHIFT_3 = np.uint64(31)


def sample_ids(
    *, seed: int, step: int, num_samples: int, count: int, epoch_end: EpochEnd = "continue"
) -> NDArray[np.int64]:
    """Return the `count` sample ids of step `step`, each in [0, num_samples)."""
    assert num_samples > 0
    assert step >= 0
    assert count >= 0
    place = np.arange(count, dtype=np.int64)
    if epoch_end == "pad" and count:
        steps = -(-num_samples // count)
        position = step % steps * count + place
        epoch = np.full(count, step // steps, dtype=np.int64)
    else:
        first = step * count
        position = first % num_samples + place
        epoch = first // num_samples + position // num_samples
    return _permuted(f"{seed}", epoch, position % num_samples, num_samples)


def numbered_ids(
    numbers: NDArray[np.int64], *, seed: int, source: str, num_samples: int
) -> NDArray[np.int64]:
    """Return the samples that a source of a mixture gives as its numbers 0, 1, 2 ... of a run.

    `source` is the hash of its data: each source has an order of its own.
    """
    epoch = numbers // num_samples
    return _permuted(f"{seed}\0{source}", epoch, numbers % num_samples, num_samples)


def _permuted(
    order: str, epoch: NDArray[np.int64], position: NDArray[np.int64], num_samples: int
) -> NDArray[np.int64]:
    """Return the entries at these positions of the permutations of these epochs."""
    bits = (num_samples - 1).bit_length()
    keys_RN = _keys(order, epoch, _ROUNDS_SMALL if bits < _SMALL_BITS else _ROUNDS)
    value = position.astype(np.uint64)
    outside = np.arange(len(value))
    while len(outside):
        value[outside] = _feistel(value[outside], keys_RN[:, outside], bits)
        outside = outside[value[outside] >= np.uint64(num_samples)]
    return value.astype(np.int64)


def sequential_ids(*, batch: int, count: int) -> NDArray[np.int64]:
    """Return the sample ids of validation batch `batch`: in order, without end.

    Ids past the last sample are read as sequences without a counted token, so the last batch of a
    validation pass is as large as the others and counts every token once.
    """
    return batch * count + np.arange(count, dtype=np.int64)


def _keys(order: str, epoch: NDArray[np.int64], num_rounds: int) -> NDArray[np.uint64]:
    """Return the keys of all rounds for each entry of `epoch`."""
    text = f"sample-order\0{order}".encode()
    base = np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), dtype="<u8")
    keys = _mix(_mix(epoch.astype(np.uint64) * _GOLDEN + base))
    rounds = np.arange(1, num_rounds + 1, dtype=np.uint64) * _GOLDEN
    return _mix(keys[np.newaxis, :] + rounds[:, np.newaxis])


def _feistel(
    value: NDArray[np.uint64], keys_RN: NDArray[np.uint64], bits: int
) -> NDArray[np.uint64]:
    """Map [0, 2**bits) onto itself; the two parts of the bits may differ in width by one."""
    right_bits = np.uint64((bits + 1) // 2)
    right_mask = np.uint64((1 << ((bits + 1) // 2)) - 1)
    left_mask = np.uint64((1 << (bits // 2)) - 1)
    left, right = value >> right_bits, value & right_mask
    for number, keys in enumerate(keys_RN):
        if number % 2 == 0:
            left = left ^ (_mix(right ^ keys) & left_mask)
        else:
            right = right ^ (_mix(left ^ keys) & right_mask)
    return (left << right_bits) | right


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> _SHIFT_1)) * _MIX_1
    bits = (bits ^ (bits >> _SHIFT_2)) * _MIX_2
    return bits ^ (bits >> _SHIFT_3)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Say how a global batch is cut: dp x num_microbatches x microbatch_sequences."""

    dp: int
    num_microbatches: int
    microbatch_sequences: int
    sequence_length: int
    separate_documents: bool = False

    @classmethod
    def from_plan(cls, plan: Plan) -> BatchLayout:
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
class MicrobatchTokens:
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

    dataset: AnyDataset
    layout: BatchLayout
    sample_ids: NDArray[np.int64]

    @property
    def num_valid(self) -> int:
        """Return the number of labels that count, over all ranks and microbatches."""
        return self.dataset.count_valid(self.sample_ids, self.layout.sequence_length)

    def microbatch(self, *, dp_rank: int, microbatch: int) -> MicrobatchTokens:
        """Read what data-parallel rank `dp_rank` computes as its microbatch `microbatch`."""
        positions = self.layout.positions(dp_rank=dp_rank, microbatch=microbatch)
        ids = self.sample_ids[positions]
        inputs_BT, labels_BT = self.dataset.read(ids, self.layout.sequence_length)
        documents = None
        if self.layout.separate_documents:
            documents = self.dataset.document_starts(ids, inputs_BT)
        return MicrobatchTokens(
            inputs_BT=inputs_BT, labels_BT=labels_BT, sample_ids_B=ids, documents=documents
        )


def training_batch(
    dataset: AnyDataset,
    layout: BatchLayout,
    *,
    seed: int,
    step: int,
    epoch_end: EpochEnd = "continue",
) -> GlobalBatch:
    """Return the global batch of `step` (from 0): the same samples under every layout."""
    if isinstance(dataset, MixedDataset):
        ids = _mixed_ids(dataset, layout, seed=seed, step=step)
        return GlobalBatch(dataset=dataset, layout=layout, sample_ids=ids)
    ids = sample_ids(
        seed=seed,
        step=step,
        num_samples=dataset.num_samples(layout.sequence_length),
        count=layout.global_sequences,
        epoch_end=epoch_end,
    )
    return GlobalBatch(dataset=dataset, layout=layout, sample_ids=ids)


def _mixed_ids(
    dataset: MixedDataset, layout: BatchLayout, *, seed: int, step: int
) -> NDArray[np.int64]:
    """Return the samples of a step of a mixture: a function of the seed and the step alone."""
    length = layout.sequence_length
    source_B, number_B = dataset.mixture.sequences(step=step, count=layout.global_sequences)
    local_B = np.empty_like(number_B)
    for source, part in enumerate(dataset.parts):
        rows = source_B == source
        local_B[rows] = numbered_ids(
            number_B[rows],
            seed=seed,
            source=part.index.hash,
            num_samples=part.num_samples(length),
        )
    return dataset.ids(source_B, local_B, length)


def validation_batch(dataset: AnyDataset, layout: BatchLayout, *, batch: int) -> GlobalBatch:
    """Return batch `batch` of a pass over the validation part: in order, each token once."""
    assert 0 <= batch < num_validation_batches(dataset, layout)
    ids = sequential_ids(batch=batch, count=layout.global_sequences)
    return GlobalBatch(dataset=dataset, layout=layout, sample_ids=ids)


def num_validation_batches(dataset: AnyDataset, layout: BatchLayout) -> int:
    """Return how many global batches one pass over the validation part takes."""
    return -(-dataset.num_samples(layout.sequence_length) // layout.global_sequences)
