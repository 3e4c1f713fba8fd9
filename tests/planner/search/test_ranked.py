"""Plans of an answer are ordered by what they are worth, and become Plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.planner.search.ranked import (
    RankedPlan,
    closed_form_plan,
    closed_form_plans,
    estimate_candidate,
    objective_value,
    pick_finalists,
    pipeline_order,
    ranking_key,
    settings_from_ranked,
)
from echelon.planner.search.sweep import SearchSweep
from tests.planner.requests import small


def test_finalists_become_plans_best_first() -> None:
    request = small()
    sweep = SearchSweep(request, keep=6)
    sweep.walk(8)
    scored = sweep.best.ranked()
    picked = pick_finalists(request, scored, top=2)
    assert len(picked.ranked) == 2
    assert len(picked.rest) == len(scored) - 2 - sum(picked.refused.values())
    keys = [ranking_key(request, one)[0] for one in (*picked.ranked, *picked.rest)]
    assert keys == sorted(keys)
    for one in picked.ranked:
        assert one.plan is not None
        assert one.plan.mesh == one.candidate.mesh
        assert one.estimate.bytes_held <= request.memory_bytes


def test_seconds_count_for_each_device_where_tokens_do() -> None:
    request = small()
    sweep = SearchSweep(request, keep=1)
    sweep.walk(8)
    choice = sweep.best.ranked()[0].candidate()
    estimate = estimate_candidate(request, choice)
    assert objective_value(request, estimate) == estimate.step_s
    many = replace(request, objective="throughput")
    assert objective_value(many, estimate) == pytest.approx(8 * estimate.step_s)


def test_an_even_cut_of_blocks_is_said_so() -> None:
    request = small(pins=["pp=2", "virtual=1"])
    sweep = SearchSweep(request, keep=1)
    sweep.walk(8)
    choice = sweep.best.ranked()[0].candidate()
    order = pipeline_order(choice)
    assert (order.num_ranks, order.num_stages) == (2, 2)
    one = RankedPlan(
        candidate=choice,
        estimate=estimate_candidate(request, choice),
        simulated=False,
        stages=((0, 1, 2), (3, 4, 5)),
    )
    assert settings_from_ranked(request, one)["pipeline.stages"] == "even"
    other = replace(one, stages=((0, 1), (2, 3, 4, 5)))
    assert settings_from_ranked(request, other)["pipeline.stages"] == [[0, 1], [2, 3, 4, 5]]


def test_finalists_that_are_computed_together_take_what_each_takes_alone() -> None:
    request = small(memory_gb=4.0)
    sweep = SearchSweep(request)
    sweep.walk(8)
    choices = [one.candidate() for one in sweep.best.ranked()]
    assert len({choice.mesh.pp for choice in choices}) > 1
    for one in closed_form_plans(request, choices):
        alone = closed_form_plan(request, one.candidate).estimate
        assert one.estimate.inputs == alone.inputs
        assert one.estimate.seconds == pytest.approx(alone.seconds, rel=1e-12)
        assert one.estimate.bytes == pytest.approx(alone.bytes, rel=1e-12)
    assert closed_form_plans(request, []) == []
