"""Two plans side by side: settings that differ, and exact bytes of the fullest and busiest rank."""

from __future__ import annotations

from itertools import pairwise

import pytest

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.cost.bytes.held import bytes_held
from echelon.cost.bytes.sent import bytes_sent_by_axis
from echelon.planner.explain.compare import compare_plans, summarize_plan
from echelon.planner.predict.estimate import estimate_plan
from tests.interop.plans import MESHES, job_of, plans


def plan_of(*settings: str) -> Plan:
    return job_of(settings).plan


def test_a_plan_beside_itself_differs_in_nothing() -> None:
    plan = plan_of("mesh.pp=2")
    found = compare_plans(plan, plan)
    assert found.differences == ()
    assert found.same_mathematics
    assert found.same_layout


def test_another_layout_is_the_same_mathematics() -> None:
    found = compare_plans(plan_of(), plan_of("mesh.dp_shard=4", "zero.stage=2"))
    assert found.same_mathematics
    assert not found.same_layout
    changed = {one.setting: (one.a, one.b) for one in found.differences}
    assert changed["mesh.dp_shard"] == (1, 4)
    assert changed["zero.stage"] == (0, 2)
    assert not any(one.changes_numbers for one in found.differences)


def test_settings_that_change_numbers_are_those_of_the_mathematics() -> None:
    found = [job_of(settings).plan for settings in plans("megatron")[::2]]
    for a, b in pairwise(found):
        comparison = compare_plans(a, b)
        changes = any(one.changes_numbers for one in comparison.differences)
        assert comparison.same_mathematics is not changes


@pytest.mark.parametrize("mesh", MESHES[1::3])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bytes_are_those_of_the_fullest_and_the_busiest_rank(
    mesh: tuple[str, ...], optimizer: str
) -> None:
    plan = plan_of(*mesh, f"optimizer.kind={optimizer}")
    side, ranks = summarize_plan(plan), range(plan.mesh.world_size)
    held = [sum(term.bytes for term in bytes_held(plan, rank)) for rank in ranks]
    sent = [sum(bytes_sent_by_axis(plan, rank).values()) for rank in ranks]
    assert sum(side.held.values()) == max(held)
    assert sum(side.sent.values()) == max(sent)
    assert sum(side.seconds.values()) == pytest.approx(estimate_plan(plan).step_s)


def test_a_name_is_no_difference_and_a_cluster_is() -> None:
    a = load_job("nano").plan
    b = load_job("nano", ["cluster.preset=1xh100", "precision.parameters=fp32"]).plan
    differences = compare_plans(a, b).differences
    # Other devices have other kernels.
    assert [one.setting for one in differences] == ["kernels.provider", "kernels.fused", "cluster"]
    assert not any(one.changes_numbers for one in differences)
    again = load_job("nano", ["train.run_name=other"]).plan
    assert compare_plans(a, again).differences == ()
