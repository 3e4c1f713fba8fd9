"""The claims about meetings, on evidence without ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from echelon.core.plan import Plan
from echelon.layout.islands import island_plan, islands_of
from echelon.proof.claims.claims import CLAIMS
from echelon.proof.claims.islands import (
    OUTER_MOMENTUM,
    OUTER_PARAMETERS,
    islands_agree,
    outer_steps,
)
from echelon.proof.claims.plan_evidence import PlanEvidence, RoundsEvidence
from echelon.proof.evidence.evidence import float64_tolerance
from echelon.proof.observed import ObservedRun
from echelon.proof.oracle.local_sgd import OuterStep, run_islands
from echelon.proof.ranks import ObservedShard, RankResult
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout
from tests.proof.run.local_sgd import NESTEROV, with_islands

Say = Callable[[int, OuterStep, str], torch.Tensor]
"""From island, step and name to the outer parameters that a rank tells."""


def evidence_of(say: Say, **local: Any) -> list[PlanEvidence]:
    """Return the evidence of two islands of one rank, which tell what `say` says."""
    plan: Plan = shrink(with_islands(layout(accumulation=1), **local), precision="fp64")
    found = run_islands(plan, 4)
    observed = [ObservedRun(island_plan(plan, i), [_result(i, found.outer, say)]) for i in range(2)]
    return [
        PlanEvidence(
            plan=island_plan(plan, i),
            reference_plan=island_plan(plan, i),
            steps=found.islands[i],
            run=observed[i],
            tolerance=float64_tolerance(),
            rounds=RoundsEvidence(
                plan=plan, island=islands_of(plan)[i], outer=found.outer, observed=observed
            ),
        )
        for i in range(2)
    ]


def _result(island: int, outer: tuple[OuterStep, ...], say: Say) -> RankResult:
    shards: list[ObservedShard] = []
    for one in outer:
        kinds = {OUTER_PARAMETERS: {n: say(island, one, n) for n in one.after}}
        kinds[OUTER_MOMENTUM] = dict(one.momentum_after)
        shards += [
            ObservedShard(
                rank=0,
                kind=kind,
                step=one.step,
                name=name,
                global_shape=tuple(tensor.shape),
                offset=(0,) * tensor.dim(),
                primary=True,
                tensor=tensor,
            )
            for kind, tensors in kinds.items()
            for name, tensor in tensors.items()
        ]
    return RankResult(rank=0, reports=(), shards=tuple(shards))


def test_what_the_formula_says_holds_parameters_and_momentum() -> None:
    for one in evidence_of(lambda _, step, name: step.after[name], **NESTEROV):
        checks = list(outer_steps(one))
        assert {check.detail for check in checks} == {"the outer parameters", "the outer momentum"}
        assert all(check.error <= check.allowed for check in checks)
        assert not any(check.error for check in islands_agree(one))


def test_a_step_that_is_not_taken_and_bits_of_an_island_are_seen() -> None:
    stays = evidence_of(lambda _, step, name: step.before[name])[0]
    wrong = [check for check in outer_steps(stays) if check.error > check.allowed]
    assert {check.step for check in wrong} == {1, 3}
    tiny = evidence_of(lambda i, step, name: step.after[name] * (1 + i * 1e-15))
    assert not any(check.error for check in islands_agree(tiny[0]))
    (claim,) = (one for one in CLAIMS if one.rule.id == "prove-islands-agree")
    results = [claim.judge(one) for one in tiny]
    assert [one is not None and one.holds for one in results] == [True, False]
    assert all(check.error <= check.allowed for check in outer_steps(tiny[1]))
