"""Batches are held to what they must be; each thing that is wrong with one is told by its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from echelon.core.settings.list_types import MixturePhase
from echelon.proof.independent.reading import (
    learning_rates,
    mixed_batches,
    proof_batches,
    trainer_batches,
)
from echelon.proof.oracle.batches import global_batch
from echelon.proof.shrink import shrink
from echelon.proof.subject import ProofBatch
from echelon.training.data.mixed_dataset import Mixture
from tests.proof.layouts import layout

PLAN = shrink(layout(dp=2, accumulation=1, documents="separate"), precision="fp64")


PHASES = (
    MixturePhase(until_step=2, weights=(0.7, 0.3, 0.0)),
    MixturePhase(until_step=None, weights=(0.2, 0.3, 0.5)),
)


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


def test_a_mixture_whose_weights_change_holds() -> None:
    checks = list(mixed_batches(PLAN, 4))
    assert [one for one in checks if one.error] == []
    # Four steps, and a pass over what validates.
    assert len({one.step for one in checks}) > 4
    assert {one.subject for one in checks} == {
        *("order of samples", "token batch", "labels", "document starts", "count of tokens")
    }


@pytest.mark.parametrize(
    "bug",
    [
        lambda step, count: (np.zeros(count, int), step * count + np.arange(count)),
        lambda step, count: tuple(  # a phase that ends a step late
            Mixture(phases=PHASES).sequences(step=max(0, step - 1), count=count)
        ),
    ],
)
def test_a_wrong_mixture_is_told(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Mixture.sequences

    def wrong_sequences(self: Mixture, *, step: int, count: int) -> Any:
        monkeypatch.setattr(Mixture, "sequences", right)
        try:
            return bug(step, count)
        finally:
            monkeypatch.setattr(Mixture, "sequences", wrong_sequences)

    monkeypatch.setattr(Mixture, "sequences", wrong_sequences)
    told = [one for one in mixed_batches(PLAN, 4) if one.error]
    assert {"order of samples", "token batch"} <= {one.subject for one in told}
    assert all(one.detail.startswith("of a mixture: ") for one in told)


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
