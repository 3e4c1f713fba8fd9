"""Races fail their claims, and other bits in a late run fail theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from echelon.core.rulebook import prove as rules
from echelon.parallel.completion.in_flight import Race, RaceKind
from echelon.proof.causes.diagnose import RACE_RULES
from echelon.proof.claims.claims import judge, judge_races
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.late import LateRun
from echelon.proof.ranks import ObservedShard
from echelon.proof.subject import StepRecord
from tests.proof.layouts import layout
from tests.proof.replicas import replicas


def race(kind: RaceKind) -> Race:
    """Return a race of rank 1."""
    return Race(
        kind=kind,
        operation="send x",
        axis="pp",
        step=1,
        rank=1,
        at="a.py:1 in f",
        says="its input is changed by mul_",
        when_s=0.0,
    )


def evidence(*races: Race, **changes: Callable[..., object]) -> PlanEvidence:
    """Return two runs of one rank, the late one changed."""
    plan = layout(accumulation=1)
    prompt, other = replicas(plan), replicas(plan, **changes)  # type: ignore[arg-type]
    late = LateRun(races=races, num_operations=(7,), observed=other.run)
    return replace(prompt, late=late)


def test_a_run_without_races_and_with_the_same_bits_keeps_all_claims() -> None:
    results = {result.rule: result for result in judge(evidence())}
    for rule in (*RACE_RULES.values(), rules.PROVE_LATE):
        assert results[rule].holds, rule.id
        assert results[rule].compared
    assert results[rules.PROVE_AWAITED].note == "7 operations"


@pytest.mark.parametrize("kind", RaceKind)
def test_a_race_fails_the_claim_of_its_kind_only(kind: RaceKind) -> None:
    results = judge_races(evidence(race(kind)))
    (broken,) = [result for result in results if not result.holds]
    assert broken.rule is RACE_RULES[kind]
    (failure,) = broken.failures
    assert (failure.step, failure.subject) == (1, "send x")
    assert failure.detail == f"{kind}: its input is changed by mul_, rank 1, at a.py:1 in f"


def test_other_bits_are_told_by_name() -> None:
    def shard(piece: ObservedShard) -> torch.Tensor:
        wrong = piece.kind == "gradients" and piece.name == "head.weight"
        return piece.tensor * (1 + 1e-6) if wrong else piece.tensor

    results = {result.rule: result for result in judge(evidence(shard=shard))}
    failed = results[rules.PROVE_LATE].failures
    assert [(one.step, one.subject) for one in failed] == [(0, "head.weight")]
    assert 0 < failed[0].error < 1e-5
    assert failed[0].detail == "gradients: other bits with late completion, on ranks [0]"


def test_other_numbers_are_told_by_rank() -> None:
    def report(rank: int, step: int, record: StepRecord) -> StepRecord:
        return replace(record, loss=2.0 * record.loss)

    results = {result.rule: result for result in judge(evidence(report=report))}
    (failed,) = results[rules.PROVE_LATE].failures
    assert failed.subject == "loss of rank 0"
    assert "with late completion" in failed.detail
