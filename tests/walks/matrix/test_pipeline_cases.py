"""The matrix of pipelines is whole and legal, also shrunk; like others it has experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product

import pytest

from echelon.config.rules.finders import plan_problems
from echelon.core.plan import Plan
from echelon.proof.shrink import shrink
from echelon.schedule.build import SCHEDULES
from echelon.schedule.check import check_schedule
from echelon.schedule.from_plan import schedule_from_plan
from tests.walks.matrix.cases import RECOMPUTE_POLICIES, MatrixCase
from tests.walks.matrix.context_cases import context_cases
from tests.walks.matrix.pipeline_cases import (
    AUTO,
    FILE,
    PIPELINE_COMBINATIONS,
    num_microbatches,
    pipeline_cases,
)
from tests.walks.matrix.zero_cases import zero_cases


@cache
def built(case: MatrixCase) -> Plan:
    """Return the plan of a case; some pipelines take a search, and two tests look at them."""
    return case.plan()


def test_the_matrix_of_pipelines_is_whole() -> None:
    every = list(pipeline_cases())
    assert {(case.schedule, case.pp, case.combination, case.recompute) for case in every} == set(
        product((*SCHEDULES, FILE, AUTO), (2, 4), PIPELINE_COMBINATIONS, RECOMPUTE_POLICIES)
    )
    assert len(every) == len(SCHEDULES) * 168 + 2 * 168 == 2016
    assert {case.world_size for case in every} == {2, 4, 8}
    for schedule, pp, microbatches in product(SCHEDULES, (2, 4), ("p", "2p", "3p+1")):
        count = num_microbatches(schedule, pp, microbatches)
        allowed = SCHEDULES[schedule].allows_microbatches
        assert allowed(pp, count)
        asked = {"p": pp, "2p": 2 * pp, "3p+1": 3 * pp + 1}[microbatches]
        assert not any(allowed(pp, less) for less in range(asked, count))


@pytest.mark.slow
def test_a_fifth_of_the_pipelines_are_legal_plans_and_shrink_to_such() -> None:
    met: set[str] = set()
    for case in pipeline_cases():
        if case.seed % 5:  # the search takes its time
            continue
        plan = built(case)
        planned = schedule_from_plan(plan)
        check_schedule(planned)
        counts = [len(stage) for stage in plan.layout.pipeline.stages]
        assert planned.num_stages == len(counts)
        assert planned.num_microbatches == plan.num_microbatches
        met |= {"empty"} if 0 in counts else set()
        met |= {"uneven"} if max(counts) > 1 else set()
        met |= {"both ways in a file"} if planned.mirrored and case.schedule == FILE else set()
        met |= {"sequence parallel"} if plan.layout.sequence_parallel else set()
        met |= {plan.mathematics.optimizer.kind, f"per rank {len(counts) // case.pp}"}
        if case.seed % 9 == 0:
            assert Plan.from_json(plan.to_json()) == plan
            check_schedule(schedule_from_plan(shrink(plan)))
    assert met == {
        *("both ways in a file", "empty", "uneven", "sequence parallel", "adamw", "sgd", "muon"),
        *("per rank 1", "per rank 2"),
    }


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", [zero_cases, pipeline_cases, context_cases])
def test_other_matrices_have_experts_too(family: Callable[[], Iterator[MatrixCase]]) -> None:
    kinds: set[tuple[int, int, int]] = set()
    for case in family():
        if case.seed % 5:  # building pipelines takes its time
            continue
        plan = built(case)
        layout = plan.layout.experts
        if plan.model.experts is not None:
            assert not [*plan_problems(plan), *plan_problems(shrink(plan))]
            kinds.add((plan.mesh.ep, layout.expert_tp, layout.zero_stage))
    assert {ep for ep, _, _ in kinds} == {1, 2}
    assert {pieces for _, pieces, _ in kinds} == {1, 2}
    assert {stage for _, _, stage in kinds} >= ({0, 3} if family is context_cases else {0, 1, 2, 3})
