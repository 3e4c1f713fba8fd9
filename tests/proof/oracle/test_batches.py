"""The made-up batches are the same everywhere, and nothing in them is even."""

from __future__ import annotations

import torch

from echelon.models.batch import IGNORED_LABEL
from echelon.proof.oracle.batches import global_batch, overflow_steps, valid_counts
from echelon.proof.oracle.loss_scale import with_scale
from echelon.proof.shrink import shrink
from tests.proof.layouts import FP16, layout


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    plan = shrink(layout(dp=2))
    first, again, other = (global_batch(plan, step) for step in (1, 1, 2))
    assert first.sample_ids == again.sample_ids
    assert torch.equal(first.inputs_BT, again.inputs_BT)
    assert torch.equal(first.labels_BT, again.labels_BT)
    assert not set(first.sample_ids) & set(other.sample_ids)
    assert not torch.equal(first.inputs_BT, other.inputs_BT)


def test_no_two_microbatches_and_no_two_replicas_have_as_many_tokens() -> None:
    plan = shrink(layout(dp=2))
    batch = global_batch(plan, 0)
    counts = [
        [
            int((batch.microbatch(plan, dp_rank, m).labels_BT != IGNORED_LABEL).sum())
            for m in range(plan.num_microbatches)
        ]
        for dp_rank in range(2)
    ]
    assert [count for row in counts for count in row] == valid_counts(plan)
    assert len({sum(row) for row in counts}) == 2
    assert all(len(set(row)) == len(row) for row in counts)
    assert min(min(row) for row in counts) > 0


def test_labels_are_the_next_tokens() -> None:
    batch = global_batch(shrink(layout()), 0)
    labels, following = batch.labels_BT[:, :-1], batch.inputs_BT[:, 1:]
    counted = labels != IGNORED_LABEL
    assert torch.equal(labels[counted], following[counted])


def test_the_largest_token_id_is_met() -> None:
    plan = shrink(layout(tp=2))
    batch = global_batch(plan, 0)
    assert int(batch.inputs_BT.max()) == plan.model.vocab - 1


def test_microbatches_cover_the_batch() -> None:
    plan = shrink(layout(dp=2))
    batch = global_batch(plan, 0)
    ids = [
        i
        for dp_rank in range(2)
        for m in range(plan.num_microbatches)
        for i in batch.microbatch(plan, dp_rank, m).sample_ids
    ]
    assert tuple(ids) == batch.sample_ids


def test_a_loud_step_is_one_token_over_and_over() -> None:
    plan = shrink(layout(dp=2, precision=FP16), precision="fp64")
    assert list(overflow_steps(plan)) == []
    loud = with_scale(plan, 2.0**300)
    assert list(overflow_steps(loud)) == [1]
    batch = global_batch(loud, 1)
    counted = batch.labels_BT != IGNORED_LABEL
    assert bool((batch.inputs_BT == plan.model.vocab - 1).all())
    assert bool((batch.labels_BT[counted] == 0).all())
    assert int(counted.sum()) == sum(valid_counts(plan))
    assert torch.equal(global_batch(loud, 0).inputs_BT, global_batch(plan, 0).inputs_BT)
