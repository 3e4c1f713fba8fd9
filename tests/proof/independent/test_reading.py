"""Batches are held to what they must be; each thing that is wrong with one is told by its name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.proof.independent.reading import learning_rates, proof_batches, trainer_batches
from echelon.proof.oracle.batches import global_batch
from echelon.proof.shrink import shrink
from echelon.proof.subject import ProofBatch
from tests.proof.layouts import layout

PLAN = shrink(layout(dp=2, accumulation=1, documents="separate"), precision="fp64")


def wrong(batches: list[ProofBatch]) -> dict[str, str]:
    """Return what is told of the batches that are wrong, by its name."""
    return {one.subject: one.detail for one in proof_batches(PLAN, batches) if one.error}


def test_right_batches_and_rates_hold() -> None:
    assert wrong([global_batch(PLAN, step) for step in range(3)]) == {}
    checks = list(trainer_batches(PLAN, 3))
    assert [one for one in checks if one.error] == []
    assert {one.subject for one in checks} == {
        *("order of samples", "token batch", "labels", "document starts", "count of tokens")
    }
    assert all(one.error < 1e-15 for one in learning_rates(PLAN))


def test_what_is_wrong_with_a_batch_is_told() -> None:
    batch = global_batch(PLAN, 0)
    assert batch.documents is not None
    assert "come twice" in wrong([batch, batch])["order of samples"]
    big = torch.full_like(batch.inputs_BT, PLAN.model.vocab)
    assert "vocabulary" in wrong([replace(batch, inputs_BT=big)])["token batch"]
    same = batch.inputs_BT[:1].expand_as(batch.inputs_BT)
    assert wrong([replace(batch, inputs_BT=same)])["token batch"] == "two sequences are the same"
    short = replace(batch, inputs_BT=batch.inputs_BT[:, 1:], labels_BT=batch.labels_BT[:, 1:])
    assert "tokens instead of" in wrong([short])["token batch"]
    none = torch.full_like(batch.labels_BT, -100)
    assert wrong([replace(batch, labels_BT=none)])["labels"] == "no label counts"
    rolled = batch.labels_BT.roll(1, dims=1)
    assert "comes next" in wrong([replace(batch, labels_BT=rolled)])["labels"]


@pytest.mark.parametrize("starts", [(1, 2), (0, 0), (0, 99)])
def test_starts_that_are_none_are_told(starts: tuple[int, ...]) -> None:
    batch = global_batch(PLAN, 0)
    documents = (starts,) * len(batch.sample_ids)
    assert "not the starts" in wrong([replace(batch, documents=documents)])["document starts"]
    assert wrong([replace(batch, documents=None)])["document starts"] == "documents are joined"
