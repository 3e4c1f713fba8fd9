"""A gradient that is reduced in its update is right where the update is, and else is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.proof.claims.claims import judge
from echelon.proof.claims.taken import BY_UPDATE, error_of_update, gradients, moves_untaken
from echelon.proof.evidence.evidence import CapturedEvidence
from tests.proof.verify.captures import AFTER, BEFORE, GRADIENT, evidence_of

PARTS = (torch.tensor([2.0, 0.0, 1.0, 0.0]), torch.tensor([0.0, 2.0, 1.0, 2.0]))
OWN = {
    key: values
    for rank, part in enumerate(PARTS)
    for key, values in {
        (rank, "gradients"): {n: g * part for n, g in GRADIENT.items()},
        (rank, "parameters"): AFTER,
    }.items()
}


def test_gradients_of_each_rank_are_right_where_the_update_is() -> None:
    (claim,) = [one for one in judge(evidence_of(OWN)) if one.rule.id == "prove-gradients"]
    assert claim.holds
    assert claim.note == "2 by their updates"
    assert {check.detail for check in gradients(evidence_of(OWN))} == {BY_UPDATE}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_copy_that_is_updated_otherwise_is_no_proof(rank: int) -> None:
    evidence = evidence_of({**OWN, (rank, "parameters"): {**AFTER, "w": AFTER["w"] + 1e-3}})
    failed = [one.subject for one in gradients(evidence) if not one.error <= one.allowed]
    assert failed == ["w"]


def test_an_update_of_nothing_tells_nothing() -> None:
    still = evidence_of({**OWN, **{(rank, "parameters"): BEFORE for rank in (0, 1)}})
    step = replace(still.steps[0], after=BEFORE)
    assert error_of_update(still, step, "w") is None
    assert not moves_untaken(evidence_of(OWN), 0, "w")


def _adam(evidence: CapturedEvidence) -> CapturedEvidence:
    """Return the evidence of an optimizer with state, in a precision that is rough."""
    step = replace(evidence.steps[0], state={"exp_avg": GRADIENT})
    rough = replace(evidence.tolerance, own_precision=True)
    return replace(evidence, steps=(step,), tolerance=rough)


def test_a_factor_is_not_forgiven_where_adam_forgives_it_and_no_state_is_seen() -> None:
    doubled = {(rank, "gradients"): {"w": 2 * GRADIENT["w"]} for rank in (0, 1)}
    evidence = _adam(evidence_of({**OWN, **doubled}))
    assert error_of_update(evidence, evidence.steps[0], "w") is None
    evidence = _adam(evidence_of(OWN))
    assert error_of_update(evidence, evidence.steps[0], "w") == pytest.approx(0.0, abs=1e-12)
