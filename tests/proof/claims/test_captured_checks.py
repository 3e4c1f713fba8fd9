"""Each claim holds of what is right, and fails of what is not."""

from __future__ import annotations

import pytest
import torch

from echelon.proof.claims.claims import judge
from echelon.proof.evidence.captured import RankReport
from tests.proof.verify.captures import AFTER, GRADIENT, Values, evidence_of, reference

UPDATE = ["prove-clipped-update", "prove-parameters", "prove-replicas"]
HALVES = {(rank, "local"): {n: g / 2 for n, g in GRADIENT.items()} for rank in (0, 1)}


def broken(
    values: Values, reports: tuple[RankReport, ...] = (RankReport(), RankReport())
) -> list[str]:
    results = judge(evidence_of(values, reports=reports))
    return [result.rule.id for result in results if not result.holds]


def test_what_is_right_is_proven_and_what_is_not_told_is_not_judged() -> None:
    results = judge(evidence_of(HALVES))
    assert all(result.holds for result in results)
    judged = {result.rule.id for result in results}
    assert "verify-local-gradients" in judged
    assert judged.isdisjoint({"prove-loss", "prove-gradient-norm", "verify-optimizer-state"})
    assert results[-1].note == "same bits"


@pytest.mark.parametrize(
    ("values", "rules"),
    [
        ({(1, "gradients"): {"w": GRADIENT["w"] * 1.001}}, ["prove-gradients", *UPDATE[1:]]),
        ({(1, "initial"): {"w": GRADIENT["w"]}}, ["prove-initial-weights"]),
        (
            {(1, "parameters"): {"w": AFTER["w"] + 1e-6}},
            ["prove-parameters", "prove-replicas"],
        ),
        ({(0, "gradients"): {"w": torch.full((4,), torch.nan)}}, ["prove-gradients", *UPDATE]),
    ],
)
def test_a_wrong_value_breaks_its_claim(values: Values, rules: list[str]) -> None:
    assert broken(values) == rules


def test_sums_before_reduction_are_judged_where_the_reduced_gradient_is_wrong() -> None:
    wrong = {n: g * 0.7 for n, g in GRADIENT.items()}
    local = {(rank, "local"): wrong for rank in (0, 1)}
    assert broken(local) == []
    assert broken(local | {(rank, "gradients"): wrong for rank in (0, 1)}) == [
        *("verify-local-gradients", "prove-gradients", *UPDATE[:2]),
    ]


def test_a_told_loss_and_norm_are_compared() -> None:
    norm = reference().steps[0].grad_norm
    right = RankReport(loss=2.0, grad_norm=norm)
    assert broken({}, (right, right)) == []
    assert broken({}, (RankReport(loss=2.1, grad_norm=norm * 2), right)) == [
        *("prove-loss", "prove-gradient-norm"),
    ]
