"""Bisection ends in a run that has only what the failure needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.launch.local.supervisor import RankPool
from echelon.launch.root_cause import FaultKind, RankFailure, RankFault
from echelon.proof.bisect.bisect import bisect
from echelon.proof.bisect.verdict import Bisection
from echelon.proof.causes.finding import Diagnosis
from echelon.proof.run import prove

WIDE = [
    *("cluster.preset=16xcpu", "mesh.pp=2", "mesh.tp=2", "mesh.dp_shard=2", "mesh.cp=2"),
    "zero.stage=3",
    *("mesh.sequence_parallel=true", "recompute.policy=full", "model.window=40", "model.layers=8"),
]


def diagnosis(rule: str) -> Diagnosis:
    return Diagnosis(
        rule=rule,
        step=1,
        tensor="head.weight",
        where="",
        factor="2",
        axis="",
        value=2.0,
        says="is twice the right one",
        residual=0.0,
        ranks=(),
        num_wrong=1,
        num_compared=2,
    )


class Prover:
    """Say of each plan what `judge` says: the rule that it breaks, or nothing."""

    def __init__(self, judge: Callable[[Plan], str]) -> None:
        self.judge, self.asked = judge, list[tuple[Plan, bool]]()

    def __call__(self, plan: Plan, *, own_precision: bool = True) -> Any:
        self.asked.append((plan, own_precision))
        rule = self.judge(plan)
        found = diagnosis(rule) if rule else None
        return SimpleNamespace(diagnosis=found, passes=[SimpleNamespace(holds=not rule)])


def bisected(judge: Callable[[Plan], str], *settings: str) -> tuple[Bisection | None, Prover]:
    prover = Prover(judge)
    return bisect(load_job("nano", settings).plan, prover), prover


def test_two_settings_that_fail_together_are_found() -> None:
    def judge(plan: Plan) -> str:
        broken = plan.mesh.tp == 2 and plan.layout.zero.stage == 3
        return "prove-gradients" if broken else ""

    found, prover = bisected(judge, *WIDE)
    assert found is not None
    # Of the two axes that stage 3 can cut over, one is left.
    names = {one.name for one in found.needed}
    assert names in (
        {"mesh.tp = 2", "zero.stage = 3", f"mesh.{axis} = 2"} for axis in ("cp", "dp_shard")
    )
    assert {one.without for one in found.needed} == {"proven"}
    assert (found.sizes["blocks"], found.sizes["microbatches"], found.sizes["steps"]) == (1, 1, 2)
    assert found.num_proofs == len(prover.asked) < 40
    # What float64 shows is looked for in float64.
    assert [own for _, own in prover.asked[1:]] == [False] * (len(prover.asked) - 1)


def test_as_many_blocks_and_microbatches_stay_as_it_takes() -> None:
    def judge(plan: Plan) -> str:
        return "prove-loss" if plan.model.layers >= 3 and plan.num_microbatches >= 2 else ""

    found, _ = bisected(judge, "model.layers=16", "mesh.dp_replicate=2")
    assert found is not None
    assert (found.sizes["blocks"], found.sizes["microbatches"]) == (4, 2)
    assert found.needed == ()


def test_another_failure_is_not_taken_for_the_same() -> None:
    def judge(plan: Plan) -> str:
        return "prove-gradients" if plan.mesh.cp == 2 else "prove-loss"

    found, _ = bisected(judge, *WIDE)
    assert found is not None
    assert found.rule == "prove-gradients"
    (needed,) = found.needed
    assert needed.name == "mesh.cp = 2"
    assert needed.without == "first wrong: head.weight: is twice the right one"


def test_a_rank_that_fails_is_a_failure_to_look_for() -> None:
    def judge(plan: Plan) -> str:
        if plan.mesh.pp == 1:
            return ""
        fault = RankFault(rank=1, kind=FaultKind.RAISED, at=0.0, summary="RuntimeError: no")
        raise RankFailure(fault, "pp1")

    found, _ = bisected(judge, *WIDE)
    assert found is not None
    assert (found.rule, found.diagnosis) == ("rank-raised", None)
    assert [one.name for one in found.needed] == ["mesh.pp = 2"]
    assert "rank 1 (pp1): RuntimeError: no" in found.summary


def test_of_a_plan_that_is_proven_nothing_is_looked_for() -> None:
    found, prover = bisected(lambda plan: "", *WIDE)
    assert found is None
    assert len(prover.asked) == 1


@pytest.mark.slow
def test_a_planted_bug_is_found_in_two_ranks(rank_pool: RankPool) -> None:
    settings = ["mesh.pp=2", "mesh.tp=2", "mesh.dp_replicate=2", "mesh.sequence_parallel=true"]
    subject = "tests.proof.mutants.reductions:norm_gradient_not_summed"
    prover = partial(prove, run_ranks=rank_pool.run, subject=subject)
    found = bisect(load_job("nano", settings).plan, prover)
    assert found is not None
    assert {one.name for one in found.needed} == {
        "mesh.tp = 2",
        "mesh.sequence_parallel = true",
    }
    assert (found.sizes["ranks"], found.sizes["blocks"]) == (2, 1)
    assert found.diagnosis is not None
    assert (found.diagnosis.tensor, found.diagnosis.axis) == ("norm.weight", "tp")
