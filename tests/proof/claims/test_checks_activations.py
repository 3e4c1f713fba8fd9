"""Activations of all ranks, put together by token, beside those of one device."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from echelon.proof.claims.checks import (
    activation_gradients,
    activations,
    copies_at,
    whole_activation,
)
from echelon.proof.claims.claims import judge
from echelon.proof.ranks import ObservedActivation
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout
from tests.proof.replicas import replicas

PLAN = shrink(layout(dp=2), precision="fp64")
SITE = "layers.1.attention"


def test_right_activations_hold_on_every_rank_and_are_whole_together() -> None:
    evidence = replicas(PLAN)
    checks = [*activations(evidence), *activation_gradients(evidence)]
    assert len(checks) == 2 * (6 * PLAN.model.layers + 1)
    assert max(check.error for check in checks) == 0.0
    right = evidence.steps[0].activations[SITE]
    assert torch.equal(
        whole_activation(copies_at(evidence.plan, evidence.run, 0)[SITE], right), right
    )


def test_a_wrong_row_of_one_rank_is_found_with_its_rank() -> None:
    def wrong(one: ObservedActivation) -> ObservedActivation:
        if one.name != SITE or one.rank != 1 or one.gradient:
            return one
        return replace(one, values_nW=one.values_nW * 1.1)

    evidence = replicas(PLAN, activation=wrong)
    (failure,) = (check for check in activations(evidence) if check.error > check.allowed)
    assert failure.subject == SITE
    assert failure.detail == "rank 1"
    assert 0.01 < failure.error < 0.1


def test_tokens_that_nobody_tells_and_other_shapes_are_no_match() -> None:
    def short(one: ObservedActivation) -> ObservedActivation:
        if one.name == SITE and one.rank == 1:
            return replace(one, tokens_n=one.tokens_n[:-2], values_nW=one.values_nW[:-2])
        if one.name == "norm":
            return replace(one, values_nW=one.values_nW[:, 1:])
        return one

    evidence = replicas(PLAN, activation=short)
    failures = {check.subject: check for check in activations(evidence) if check.error}
    assert set(failures) == {SITE, "norm"}
    assert all(math.isinf(check.error) for check in failures.values())
    assert "2 of" in failures[SITE].detail
    assert "numbers of a token" in failures["norm"].detail


def test_an_engine_that_does_not_tell_is_not_judged_by_its_activations() -> None:
    evidence = replicas(PLAN)
    evidence.run.activations.clear()
    rules = {result.rule.id for result in judge(evidence)}
    assert "prove-microbatch-loss" in rules
    assert not rules & {"prove-activations", "prove-activation-gradients"}
