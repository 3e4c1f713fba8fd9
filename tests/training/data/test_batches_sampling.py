"""The order of samples is a fair permutation per epoch and knows nothing of ranks."""

from __future__ import annotations

from collections import Counter
from hashlib import sha256
from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.config.job import EpochEnd
from echelon.training.data.batches import sample_ids, sequential_ids
from tests.walks import examples


@pytest.mark.slow
@pytest.mark.system("S08")
@given(
    seed=st.integers(0, 2**63),
    num_samples=st.integers(1, 300),
    count=st.integers(1, 70),
    first=st.integers(0, 10**6),
)
@settings(max_examples=examples(60), deadline=None)
def test_each_epoch_is_a_permutation(seed: int, num_samples: int, count: int, first: int) -> None:
    """Any window of steps, wherever it starts, covers its whole epochs exactly once."""
    num_steps = 3 * num_samples // count + 2
    steps = [
        sample_ids(seed=seed, step=step, num_samples=num_samples, count=count)
        for step in range(first, first + num_steps)
    ]
    ids = np.concatenate(steps)
    assert ids.dtype == np.int64
    begin = -(first * count) % num_samples
    epochs = ids[begin : begin + (len(ids) - begin) // num_samples * num_samples]
    assert len(epochs) >= num_samples
    for epoch in epochs.reshape(-1, num_samples):
        assert sorted(epoch) == list(range(num_samples))


@given(count=st.sampled_from([1, 2, 3, 4, 6, 12]), step=st.integers(0, 40))
def test_a_step_depends_on_its_own_number_only(count: int, step: int) -> None:
    """Resuming at a step, in a new process or not, gives the same samples as running up to it."""
    run = sample_ids(seed=5, step=0, num_samples=29, count=count * 41)
    resumed = sample_ids(seed=5, step=step, num_samples=29, count=count)
    assert resumed.tolist() == run[step * count : (step + 1) * count].tolist()


PINNED_SMALL = [5, 2, 0, 4, 8, 9, 3, 6, 1, 7, 9, 0, 1, 2, 7, 3, 4, 8, 6, 5]
PINNED_LARGE = [746886728, 425251809, 275772854, 393553750]


def test_the_order_is_pinned() -> None:
    """A change of the order would silently change every run that is resumed."""
    assert sample_ids(seed=0, step=0, num_samples=10, count=20).tolist() == PINNED_SMALL
    assert sample_ids(seed=7, step=3, num_samples=10**9 + 7, count=4).tolist() == PINNED_LARGE


@pytest.mark.system("S08")
def test_ten_samples_on_four_ranks_are_disjoint_and_cover() -> None:
    """Where a padding sampler reads 2 of 10 samples twice, every sample is read once per epoch."""
    ranks: list[list[int]] = [[] for _ in range(4)]
    for step in range(5):
        ids = sample_ids(seed=1, step=step, num_samples=10, count=4)
        for rank in range(4):
            ranks[rank].append(int(ids[rank]))
    # 5 steps of 4 are exactly two epochs of 10: in each half, each sample once, on one rank.
    read = [ranks[position % 4][position // 4] for position in range(20)]
    assert sorted(read[:10]) == sorted(read[10:]) == list(range(10))
    assert read[:10] != read[10:]


@pytest.mark.system("S08")
def test_ten_samples_on_four_ranks_are_padded_by_two_duplicates() -> None:
    """S08: ceil(10 / 4) 4 - 10 = 2 are read twice; the ranks are disjoint but for these two."""
    epochs: list[list[int]] = []
    for epoch in range(3):
        steps = [padded(step) for step in range(3 * epoch, 3 * epoch + 3)]
        ranks = [[step[rank] for step in steps] for rank in range(4)]
        read = [one for step in steps for one in step]
        counts = Counter(read)
        assert sorted(counts) == list(range(10))
        twice = [sample for sample, count in counts.items() if count == 2]
        assert (len(read), len(twice), max(counts.values())) == (12, 2, 2)
        # What is read again is what the epoch began with, and it fills the last step only.
        assert twice == read[:2] == read[10:]
        for rank, one in enumerate(ranks):
            assert len(one) == 3
            others = {sample for other in ranks[:rank] + ranks[rank + 1 :] for sample in other}
            assert set(one) & others <= set(twice)
        epochs.append(read)
    assert len({tuple(read) for read in epochs}) == 3, "each epoch has an order of its own"


def padded(step: int, *, num_samples: int = 10, count: int = 4) -> list[int]:
    """Return the samples of a step whose epochs are padded."""
    ids = sample_ids(seed=1, step=step, num_samples=num_samples, count=count, epoch_end="pad")
    return ids.tolist()


@given(num_samples=st.integers(1, 100), count=st.integers(1, 40), step=st.integers(0, 10**6))
@settings(max_examples=examples(60), deadline=None)
def test_a_padded_step_is_a_function_of_its_number(num_samples: int, count: int, step: int) -> None:
    """S08: a run resumes anywhere; an epoch of whole batches is the same under both ends."""
    steps = -(-num_samples // count)
    epoch = step // steps
    read = [
        one
        for number in range(epoch * steps, (epoch + 1) * steps)
        for one in padded(number, num_samples=num_samples, count=count)
    ]
    assert (
        padded(step, num_samples=num_samples, count=count)
        == (read[step % steps * count : (step % steps + 1) * count])
    )
    assert sorted(read[:num_samples]) == list(range(num_samples))
    assert read[num_samples:] == [read[i % num_samples] for i in range(num_samples, len(read))]
    plain = sample_ids(seed=1, step=epoch, num_samples=num_samples, count=num_samples)
    assert read[:num_samples] == plain.tolist()


def test_epochs_and_seeds_differ() -> None:
    epochs = sample_ids(seed=1, step=0, num_samples=50, count=500).reshape(10, 50)
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 10
    other = sample_ids(seed=2, step=0, num_samples=50, count=50)
    assert other.tolist() != epochs[0].tolist()


@pytest.mark.quick("2", "3", "5", "6")
@pytest.mark.parametrize("num_samples", [2, 3, 4, 5, 6, 7])
def test_all_permutations_are_equally_likely(num_samples: int) -> None:
    """Chi-square over all n! permutations of n samples, 30 expected of each: within 5 sigma."""
    kinds = factorial(num_samples)
    epochs = 30 * kinds
    ids = sample_ids(seed=11, step=0, num_samples=num_samples, count=epochs * num_samples)
    codes = ids.reshape(epochs, num_samples) @ (num_samples ** np.arange(num_samples))
    counts = np.zeros(kinds)
    found = np.unique(codes, return_counts=True)[1]
    counts[: len(found)] = found
    chi_square = float(((counts - 30) ** 2 / 30).sum())
    assert abs(chi_square - (kinds - 1)) < 5 * np.sqrt(2 * (kinds - 1)) + 1


@pytest.mark.quick("4095", "4096")
@pytest.mark.parametrize("num_samples", [17, 4095, 4096, 5000])
def test_every_sample_is_equally_likely_at_every_place(num_samples: int) -> None:
    """Sixteen places of 250 epochs, in sixteen bins of samples: chi-square within 5 sigma."""
    epochs = 250
    places = np.linspace(0, num_samples - 1, 16).astype(int)
    ids = np.stack(
        [
            sample_ids(seed=epoch, step=0, num_samples=num_samples, count=num_samples)[places]
            for epoch in range(epochs)
        ]
    )
    bins = ids * 16 // num_samples
    expected = np.bincount(np.arange(num_samples) * 16 // num_samples) / num_samples * len(ids)
    for place in range(16):
        counts = np.bincount(bins[:, place], minlength=16)
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi_square - 15) < 5 * np.sqrt(30)


def test_successive_samples_are_unrelated() -> None:
    """The correlation of each sample with the next, and with the same place an epoch later."""
    ids = sample_ids(seed=4, step=0, num_samples=10_000, count=20_000).astype(float)
    first, second = ids[:10_000], ids[10_000:]
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_steps_far_out_do_not_overflow() -> None:
    ids = sample_ids(seed=3, step=2**45, num_samples=1000, count=2**14)
    assert 0 <= ids.min() <= ids.max() < 1000


def test_validation_goes_in_order() -> None:
    assert sequential_ids(batch=2, count=3).tolist() == [6, 7, 8]


def test_the_order_of_samples_is_the_one_that_runs_were_trained_in() -> None:
    """Runs that exist are resumed: what a step reads must never change."""
    digest = sha256()
    for seed, step, num_samples, count, end in ORDERS:
        ids = sample_ids(seed=seed, step=step, num_samples=num_samples, count=count, epoch_end=end)
        digest.update(ids.astype("<i8").tobytes())
    assert digest.hexdigest()[:32] == "4aa86f1c4e5181bc8901a63a1b47b92d"


ORDERS: tuple[tuple[int, int, int, int, EpochEnd], ...] = (
    (0, 0, 7, 4, "continue"),
    (3, 5, 1000, 64, "continue"),
    (2**40, 10**6, 10**12 + 7, 256, "continue"),
    (1, 9, 10, 4, "pad"),
)
