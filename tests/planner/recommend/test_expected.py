"""`--objective expected`: what decides a long run, and what changes nothing on one node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.planner.recommend.recommend import Recommendation, noise, recommend
from echelon.planner.recommend.simplicity import complexity
from echelon.planner.search.ranked import expected_of_request, objective_value
from echelon.planner.search.request import Objective, SearchAim, SearchRequest, make_request
from echelon.planner.search.search import search
from echelon.planner.search.sweep import SearchSweep
from tests.planner.requests import small


def found(request: SearchRequest, objective: Objective) -> Recommendation:
    result = recommend(replace(request, objective=objective))
    assert isinstance(result, Recommendation)
    return result


def test_on_a_node_with_memory_to_spare_the_plan_is_the_plain_one() -> None:
    request = make_request("llama3-8b", cluster="8xh100")
    plain, expected = (found(request, objective) for objective in ("time", "expected"))
    assert plain.first.ranked.candidate == expected.first.ranked.candidate
    assert plain.first.fits > 0.99


def test_a_sweep_bounds_what_is_expected_from_below() -> None:
    request = small(objective="expected")
    sweep = SearchSweep(request, keep=1)
    sweep.walk(8)
    (scored,) = sweep.best.ranked()
    estimate = search(replace(request, top=1)).first.estimate
    told = expected_of_request(request, estimate)
    assert scored.value == pytest.approx(estimate.step_s * told.slowdown, rel=0.05)


def test_where_memory_is_tight_less_risk_wins_within_the_noise() -> None:
    """Somewhere among these memories the plain answer is riskier than it needs to be."""
    request = make_request(
        "llama2-7b",
        cluster="8xa100-80gb",
        settings=["batch.global_sequences=64", "batch.sequence_length=2048"],
        aim=SearchAim(trainer="megatron"),
    )
    surer = 0
    for memory in range(24, 72, 6):
        here = request.with_memory(memory * 1e9)
        plain, expected = (found(here, objective) for objective in ("time", "expected"))
        aim = replace(here, objective="expected")
        values = [objective_value(aim, one.first.ranked.estimate) for one in (plain, expected)]
        simpler = complexity(expected.first.ranked.candidate) < complexity(
            plain.first.ranked.candidate
        )
        assert values[1] <= values[0] * (1.0 + noise() * simpler + 1e-9)
        surer += expected.first.fits > plain.first.fits + 0.01
    assert surer > 0


@pytest.mark.slow
def test_on_sixteen_thousand_devices_a_plan_with_less_risk_wins() -> None:
    aim = SearchAim(trainer="megatron")
    surer = 0
    sets = ["batch.global_sequences=2048"]
    for memory in (20, 52, 56):
        request = make_request("llama3-70b", cluster="16384xh100", settings=sets, aim=aim)
        here = request.with_memory(memory * 1e9)
        plain, expected = (found(here, objective) for objective in ("time", "expected"))
        surer += expected.first.fits > plain.first.fits + 0.01
        told = expected_of_request(here, expected.first.ranked.estimate)
        assert told.slowdown > 1.05
    assert surer > 0


@pytest.mark.slow
def test_interruptions_leave_devices_idle_that_add_too_little() -> None:
    """131,072 devices are interrupted every 23 minutes, of which a restart takes 11."""
    request = make_request("llama3-8b", cluster="131072xh100")
    plain, expected = (found(request, objective) for objective in ("time", "expected"))
    assert plain.first.ranked.candidate.devices == 131072
    assert expected.first.ranked.candidate.devices < 131072 / 2
    aim = replace(request, objective="expected")
    values = [objective_value(aim, one.first.ranked.estimate) for one in (plain, expected)]
    assert values[1] < values[0] * (1.0 - noise())
