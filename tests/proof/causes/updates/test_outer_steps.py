"""Wrong outer steps are named by the weights of what islands moved; right ones by nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from echelon.proof.causes.updates.outer_steps import explain_outer
from echelon.proof.claims.islands import outer_steps
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.oracle.local_sgd import OuterStep
from tests.proof.claims.test_islands import evidence_of
from tests.proof.run.local_sgd import NESTEROV

RATE, MOMENTUM = 0.7, 0.9
Step = Callable[[OuterStep, str], torch.Tensor]


def mean(one: OuterStep, name: str) -> torch.Tensor:
    return (one.moved[0][name] + one.moved[1][name]) / 2


def plain(weights: tuple[float, float]) -> Step:
    return lambda one, name: (
        one.before[name]
        - sum(
            (w * moved[name] for w, moved in zip(weights, one.moved, strict=True)),
            torch.zeros_like(one.before[name]),
        )
    )


def nesterov(keep: float, ahead: float) -> Step:
    """Return a step that keeps so much of the momentum before, and goes so far ahead."""

    def step(one: OuterStep, name: str) -> torch.Tensor:
        d = mean(one, name)
        m = keep * one.momentum_before[name] + d
        return one.before[name] - RATE * (ahead * m + d * (ahead != 1.0))

    return step


def told(step: Step, **local: object) -> str:
    def say(_: int, one: OuterStep, name: str) -> torch.Tensor:
        return step(one, name) if name in one.changed else one.after[name]

    evidence: PlanEvidence = evidence_of(say, **local)[0]
    wrong = [check for check in outer_steps(evidence) if check.error > check.allowed]
    return explain_outer(evidence, wrong[0]).factor if wrong else "right"


@pytest.mark.parametrize(
    ("weights", "factor"),
    [
        ((0.5, 0.5), "right"),
        ((0.75, 0.25), "unfair mean"),
        ((1.0, 0.0), "unfair mean"),
        ((1.0, 1.0), "islands"),
        ((0.25, 0.25), "0.5"),
    ],
)
def test_weights_in_the_mean(weights: tuple[float, float], factor: str) -> None:
    assert told(plain(weights)) == factor


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (nesterov(MOMENTUM, MOMENTUM), "right"),
        (nesterov(0.0, MOMENTUM), "momentum reset"),
        (nesterov(MOMENTUM, 1.0), "no look-ahead"),
    ],
    ids=["right", "reset", "no look-ahead"],
)
def test_momenta(step: Step, factor: str) -> None:
    if factor == "no look-ahead":
        # In the first round there is no momentum before: the step is only shorter.
        assert told(step, **NESTEROV) == "0.5263"
    else:
        assert told(step, **NESTEROV) == factor


def test_what_is_no_sum_of_what_islands_moved_is_told_so() -> None:
    assert told(lambda one, name: one.before[name] + 1.0) == "none"
