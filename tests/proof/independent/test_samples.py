"""What training reads, by its definition: permutations, rows, document starts."""

from __future__ import annotations

from echelon.proof.independent.samples import read_row, samples_of_step
from echelon.training.data.batches import sample_ids


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


def test_a_row_is_tokens_and_what_comes_next() -> None:
    text = [3, 4, 0, 5, 6, 0, 0, 7]
    row = read_row(text, 0, 5, 0)
    assert (row.tokens, row.labels, row.documents) == ([3, 4, 0, 5, 6], [4, 0, 5, 6, 0], (0, 3))
    last = read_row(text, 1, 5, 0)
    assert (last.tokens, last.labels) == ([0, 0, 7, 0, 0], [0, 7, -100, -100, -100])
    assert last.documents == (0, 2)
    assert read_row(text, 2, 5, 0).labels == [-100] * 5
