"""What training reads, by its definition: permutations, rows, document starts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.settings.list_types import MixturePhase
from echelon.proof.independent.samples import Source, mixed_samples, read_row, samples_of_step
from echelon.training.data.batches import numbered_ids, sample_ids
from echelon.training.data.mixed_dataset import Mixture
from tests.walks import examples


def test_an_epoch_reads_every_sample_once() -> None:
    read = [sample for step in range(4) for sample in samples_of_step(5, step, 3, 6)]
    assert sorted(read[:6]) == sorted(read[6:]) == list(range(6))
    assert read[:6] != read[6:]


def test_the_order_is_that_of_the_trainer_for_few_and_for_many_samples() -> None:
    for num_samples in (1, 7, 4096, 4097, 100_003):
        for step in (0, 3):
            ours = samples_of_step(11, step, 8, num_samples)
            right = sample_ids(seed=11, step=step, num_samples=num_samples, count=8)
            assert ours == right.tolist()


@settings(max_examples=examples(20), deadline=None)
@given(
    st.lists(
        st.lists(st.floats(0.01, 10), min_size=3, max_size=3).map(tuple), min_size=2, max_size=3
    ),
    st.integers(1, 9),
    st.integers(0, 5),
)
def test_mixtures_are_those_of_the_trainer(
    weights: list[tuple[float, ...]], count: int, none: int
) -> None:
    # A source may have no part in a phase.
    weights[0] = tuple(0.0 if s == none else one for s, one in enumerate(weights[0]))
    ends = [*range(2, 2 * len(weights), 2), None]
    sources = [Source(hash=f"{s}" * 8, num_samples=5 + 9 * s) for s in range(3)]
    phases = list(zip(ends, weights, strict=True))
    ours = list(mixed_samples(11, 8, count, sources, phases))
    mixture = Mixture(phases=tuple(MixturePhase(until_step=e, weights=w) for e, w in phases))
    starts = [0, 5, 19]
    for step, samples in enumerate(ours):
        source_B, number_B = mixture.sequences(step=step, count=count)
        for s, number, sample in zip(source_B, number_B, samples, strict=True):
            one = sources[s]
            (local,) = numbered_ids(
                np.array([number]), seed=11, source=one.hash, num_samples=one.num_samples
            )
            assert sample == starts[s] + local


def test_a_phase_repeats_its_places_and_every_source_goes_on_where_it_was() -> None:
    sources = [Source(hash="a", num_samples=7), Source(hash="b", num_samples=4)]
    (samples,) = mixed_samples(3, 1, 4 * 7, sources, [(None, (3.0, 1.0))])
    first = [one for one in samples if one < 7]
    assert len(first) == 3 * 7
    assert sorted(first[:7]) == sorted(first[7:14]) == list(range(7))
    assert sorted(one - 7 for one in samples if one >= 7)[::2] == [0, 1, 2, 3]


def test_a_row_is_tokens_and_what_comes_next() -> None:
    text = [3, 4, 0, 5, 6, 0, 0, 7]
    row = read_row(text, 0, 5, 0)
    assert (row.tokens, row.labels, row.documents) == ([3, 4, 0, 5, 6], [4, 0, 5, 6, 0], (0, 3))
    last = read_row(text, 1, 5, 0)
    assert (last.tokens, last.labels) == ([0, 0, 7, 0, 0], [0, 7, -100, -100, -100])
    assert last.documents == (0, 2)
    assert read_row(text, 2, 5, 0).labels == [-100] * 5
