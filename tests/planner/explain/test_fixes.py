"""A fix really fits and is legal, is the cheapest of its kind, and single changes come first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.planner.explain.fixes import candidate_from_plan, find_fixes
from echelon.planner.search.ranked import RankedPlan, estimate_candidate, settings_from_ranked
from echelon.planner.search.request import SearchRequest, make_request
from echelon.planner.search.search import search, smallest_that_fits
from tests.planner.requests import small


def _over(share: float, pins: list[str]) -> tuple[SearchRequest, RankedPlan]:
    """Return a request with so much of the memory that its best plan would need, and the plan."""
    request = replace(small(pins=pins), top=1)
    best = search(request).best
    assert best is not None
    device = replace(request.cluster.device, memory_bytes=int(share * best.estimate.bytes_held))
    return replace(request, cluster=replace(request.cluster, device=device)), best


@pytest.mark.slow
def test_a_fix_of_a_plan_fits_and_is_legal() -> None:
    request, best = _over(
        0.97, ["tp=2", "pp=2", "zero=1", "recompute=none", "microbatch=2", "schedule=1f1b"]
    )
    fixes = find_fixes(request, best.candidate)
    assert fixes
    assert len(fixes[0].changes) == 1
    for fix in fixes:
        further = len(fix.changes) == 2 and fix.estimate.step_s < fixes[0].estimate.step_s
        assert len(fix.changes) == 1 or further
        on = request
        if fix.devices != best.candidate.devices:
            continue
        again = estimate_candidate(on, fix.choice)
        assert again.bytes_held <= request.memory_bytes
        before = estimate_candidate(request, best.candidate)
        assert fix.saved_bytes == pytest.approx(before.bytes_held - again.bytes_held)
        one = RankedPlan(candidate=fix.choice, estimate=again, simulated=False)
        plan = request.job(settings_from_ranked(request, one)).plan
        settings = {**best.candidate.settings(has_experts=False), **fix.settings}
        assert request.job(settings).plan.layout.mesh == plan.layout.mesh
        closed = estimate_candidate(request, best.candidate).step_s
        assert fix.lost_s.value == pytest.approx(again.step_s - closed)
        assert fix.lost_s.low <= fix.lost_s.value <= fix.lost_s.high
        assert fix.time_ratio == pytest.approx(again.step_s / closed)
        assert fix.flags.split("--set ")[1:]
    single = [fix for fix in fixes if len(fix.changes) == 1]
    same = [fix for fix in single if fix.devices == best.candidate.devices and not fix.untimed]
    assert [fix.estimate.step_s for fix in same] == sorted(fix.estimate.step_s for fix in same)


@pytest.mark.slow
def test_changes_come_in_pairs_only_where_one_is_not_enough() -> None:
    request, best = _over(0.625, ["tp=1", "pp=2", "zero=0", "recompute=none", "microbatch=3"])
    fixes = find_fixes(request, best.candidate)
    assert fixes
    count = len(fixes[0].changes)
    assert all(len(fix.changes) in (count, count + 1) for fix in fixes)
    assert all(fix.estimate.bytes_held <= request.memory_bytes for fix in fixes)
    topics = [[change.split()[0] for change in fix.changes] for fix in fixes]
    assert all(len(set(one)) == len(one) for one in topics)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cluster", "smallest"),
    [("llama3-8b", "1xa100-40gb", "2xa100-40gb"), ("llama2-13b", "2xrtx4090", "4xrtx4090")],
)
def test_the_smallest_cluster_is_told_and_no_larger_one(
    model: str, cluster: str, smallest: str
) -> None:
    """Where no change helps on the devices that there are, they are not doubled for nothing."""
    request = make_request(model, cluster=cluster)
    large = make_request(model, cluster=f"8x{cluster.partition('x')[2]}", pins=["zero=0", "tp=1"])
    roomy = search(replace(large.with_memory(1e12), top=1)).first.candidate
    mesh = replace(roomy.mesh, dp_shard=1, dp_replicate=request.cluster.num_devices, pp=1, cp=1)
    total = request.mathematics.global_sequences // request.cluster.num_devices
    choice = replace(roomy, mesh=mesh, microbatch=1, microbatches=total, schedule="1f1b", virtual=1)
    fixes = find_fixes(request, choice)
    found = smallest_that_fits(request)
    assert found is not None
    assert found.name == smallest
    assert {fix.devices for fix in fixes} == {found.num_devices}
    assert any(fix.changes[0].startswith("another split on") for fix in fixes)
    assert all(fix.estimate.bytes_held <= request.memory_bytes for fix in fixes)


def test_a_plan_that_fits_needs_nothing() -> None:
    request, best = _over(1.5, ["pp=2"])
    assert find_fixes(request, best.candidate) == ()


def test_the_choices_of_a_plan_are_those_that_made_it() -> None:
    answer = search(small(memory_gb=4.0))
    assert answer.ranked
    for one in answer.ranked:
        assert one.plan is not None
        assert candidate_from_plan(one.plan) == replace(
            one.candidate, recomputed_share=candidate_from_plan(one.plan).recomputed_share
        )
