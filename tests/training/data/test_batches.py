"""The same samples under every layout: disjoint shares that are the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from echelon.training.data.batches import (
    BatchLayout,
    num_validation_batches,
    training_batch,
    validation_batch,
)
from echelon.training.data.dataset import IGNORED_LABEL, TokenDataset

MakeDataset = Callable[..., TokenDataset]

LAYOUTS = [
    BatchLayout(dp=dp, num_microbatches=12 // dp // b, microbatch_sequences=b, sequence_length=7)
    for dp in (1, 2, 3, 4, 6, 12)
    for b in (1, 2, 3, 4, 6, 12)
    if 12 % (dp * b) == 0
]


def _shares(layout: BatchLayout) -> list[tuple[int, int]]:
    return [(r, m) for r in range(layout.dp) for m in range(layout.num_microbatches)]


def test_the_positions_are_those_of_the_contract() -> None:
    layout = BatchLayout(dp=2, num_microbatches=3, microbatch_sequences=4, sequence_length=1)
    assert layout.global_sequences == 24
    assert layout.positions(dp_rank=0, microbatch=0) == slice(0, 4)
    assert layout.positions(dp_rank=0, microbatch=2) == slice(8, 12)
    assert layout.positions(dp_rank=1, microbatch=0) == slice(12, 16)
    assert layout.positions(dp_rank=1, microbatch=2) == slice(20, 24)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [0, 1, 5])
def test_every_layout_reads_the_same_batch(
    make_dataset: MakeDataset, layout: BatchLayout, step: int
) -> None:
    dataset = make_dataset([40, 60, 33])
    batch = training_batch(dataset, layout, seed=9, step=step)
    whole = dataset.read(batch.sample_ids, 7)
    alone = BatchLayout(dp=1, num_microbatches=1, microbatch_sequences=12, sequence_length=7)
    same = training_batch(dataset, alone, seed=9, step=step)
    assert batch.sample_ids.tolist() == same.sample_ids.tolist()
    parts = [batch.microbatch(dp_rank=r, microbatch=m) for r, m in _shares(layout)]
    assert np.concatenate([part.sample_ids_B for part in parts]).tolist() == (
        batch.sample_ids.tolist()
    )
    assert (np.concatenate([part.inputs_BT for part in parts]) == whole[0]).all()
    assert (np.concatenate([part.labels_BT for part in parts]) == whole[1]).all()
    counted = sum(int((part.labels_BT != IGNORED_LABEL).sum()) for part in parts)
    assert batch.num_valid == same.num_valid == counted


def test_replicas_see_different_data(make_dataset: MakeDataset) -> None:
    layout = BatchLayout(dp=4, num_microbatches=2, microbatch_sequences=3, sequence_length=5)
    dataset = make_dataset([200])
    batch = training_batch(dataset, layout, seed=0, step=0)
    parts = [batch.microbatch(dp_rank=r, microbatch=m).sample_ids_B for r, m in _shares(layout)]
    assert len(np.unique(np.concatenate(parts))) == layout.global_sequences


def test_the_last_sample_of_an_epoch_gives_ranks_uneven_token_counts(
    make_dataset: MakeDataset,
) -> None:
    layout = BatchLayout(dp=2, num_microbatches=1, microbatch_sequences=1, sequence_length=6)
    dataset = make_dataset([11])
    batch = training_batch(dataset, layout, seed=0, step=0)
    counts = [
        int((batch.microbatch(dp_rank=r, microbatch=0).labels_BT != IGNORED_LABEL).sum())
        for r in range(2)
    ]
    assert sorted(counts) == [4, 6]
    assert batch.num_valid == 10


@pytest.mark.parametrize("layout", LAYOUTS[:6])
@pytest.mark.parametrize("size", [9, 85, 86, 169, 200])
def test_a_validation_pass_counts_every_token_once(
    make_dataset: MakeDataset, layout: BatchLayout, size: int
) -> None:
    dataset = make_dataset([size])
    labels: list[int] = []
    num_valid = 0
    for number in range(num_validation_batches(dataset, layout)):
        batch = validation_batch(dataset, layout, batch=number)
        assert batch.num_valid > 0
        num_valid += batch.num_valid
        for r, m in _shares(layout):
            part = batch.microbatch(dp_rank=r, microbatch=m)
            assert part.inputs_BT.shape == (layout.microbatch_sequences, 7)
            labels += part.labels_BT[part.labels_BT != IGNORED_LABEL].tolist()
    assert labels == dataset.tokens(1, size).tolist()
    assert num_valid == size - 1
