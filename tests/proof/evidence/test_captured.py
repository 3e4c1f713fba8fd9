"""What ranks captured is put together by the names of one device."""

from __future__ import annotations

import pytest
import torch

from echelon.proof.evidence.captured import RankReport
from echelon.proof.evidence.run import INITIAL
from tests.proof.verify.captures import AFTER, BEFORE, GRADIENT, evidence_of


def test_wholes_updates_and_holders() -> None:
    run = evidence_of({}).run
    assert torch.equal(run.whole("parameters", 0, "w"), AFTER["w"])
    assert torch.equal(run.update(0, "w"), AFTER["w"] - BEFORE["w"].double())
    assert run.holders("gradients", 0, "v") == [0, 1]
    assert run.coverage("gradients", 0, "v").tolist() == [2, 2, 2, 2]
    assert run.whole("gradients", 1, "v").isnan().all()
    assert run.kinds(INITIAL) == ["parameters"]
    assert (run.framework, run.source("w", 1), run.copied_initial) == ("torch", "w", False)


def test_local_gradients_are_told_where_every_holder_was_seen() -> None:
    half = {name: one / 2 for name, one in GRADIENT.items()}
    both = evidence_of({(0, "local"): half, (1, "local"): half}).run
    assert list(both.local_gradients(0, "w")) == [(0, 0), (1, 0)]
    assert evidence_of({(0, "local"): half}).run.local_gradients(0, "w") == {}


def test_losses_are_averaged_by_their_tokens() -> None:
    reports = (RankReport(loss=1.0, tokens=3), RankReport(loss=2.0, tokens=1))
    assert evidence_of({}, reports=reports).run.loss(0) == pytest.approx(1.25)
    last = (RankReport(), RankReport(loss=2.0))
    assert evidence_of({}, reports=last).run.loss(0) == 2.0
    assert evidence_of({}).run.loss(0) is None
