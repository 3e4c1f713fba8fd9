"""The axis that tells wrong ranks from right ones."""

from __future__ import annotations

from echelon.core.experts import ExpertLayout
from echelon.proof.causes.finding import (
    ProofFinding,
    distinguishing_axis,
    grouped_axes,
    named_groups,
    shard_axis,
    with_distinguishing_axis,
)
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.proof.layouts import layout

HYBRID = layout(dp=4, tp=2, zero={"stage": 2}, mesh={"dp_replicate": 2, "dp_shard": 2})


def test_the_narrowest_axis_is_told() -> None:
    everyone = range(8)
    assert distinguishing_axis(HYBRID, {2, 3, 6, 7}, everyone) == ("dp_shard", [1])
    assert distinguishing_axis(HYBRID, {0, 1, 2, 3}, everyone) == ("dp_replicate", [0])
    assert distinguishing_axis(HYBRID, {4, 5}, everyone) == ("dp", [2])
    assert distinguishing_axis(HYBRID, {1, 3, 5, 7}, everyone) == ("tp", [1])
    assert distinguishing_axis(HYBRID, {0, 3}, everyone) is None
    assert distinguishing_axis(HYBRID, set(everyone), everyone) is None
    assert distinguishing_axis(HYBRID, set(), everyone) is None


def test_whole_parameters_have_one_data_axis() -> None:
    assert distinguishing_axis(layout(dp=2), {1}, range(2)) == ("dp", [1])


def test_context_ranks_are_told_from_data_ranks() -> None:
    split = layout(mesh={"cp": 2, "dp_shard": 2}, zero={"stage": 2})
    assert distinguishing_axis(split, {1, 3}, range(4)) == ("cp", [1])
    assert distinguishing_axis(split, {0, 1}, range(4)) == ("dp_shard", [0])
    assert distinguishing_axis(split, {1}, range(4)) == ("dp_shard and cp", [1])
    assert shard_axis(split) == "dp_shard and cp"
    alone = layout(mesh={"cp": 2})
    assert distinguishing_axis(alone, {1}, range(2)) == ("cp", [1])
    assert [axis for axis, _ in grouped_axes(alone)] == ["cp", "cp", "tp", "pp"]
    assert shard_axis(layout(mesh={"cp": 2}, zero={"stage": 1})) == "cp"
    assert shard_axis(HYBRID) == "dp_shard"


def test_a_finding_keeps_the_axis_that_it_has() -> None:
    finding = ProofFinding(factor="2", description="twice")
    told = with_distinguishing_axis(HYBRID, finding, {2, 3, 6, 7}, range(8))
    assert (told.axis, told.description) == ("dp_shard", "only on dp_shard [1]: twice")
    known = with_distinguishing_axis(
        HYBRID, ProofFinding(factor="2", description="twice", axis="pp"), {2, 3, 6, 7}, range(8)
    )
    assert known.axis == "pp"
    assert with_distinguishing_axis(HYBRID, finding, set(range(8)), range(8)) == finding


def test_ranks_that_hold_the_same_experts_are_told_from_those_that_hold_others() -> None:
    # Expert groups are 0 1 and 2 3; ranks 0 and 2 hold the same experts.
    plan = plan_of(model=MIXTRAL, dp_shard=4, ep=2)
    assert dict(named_groups(plan, expert=True)) == {
        "edp": ((0, 2), (1, 3)),
        "ep": ((0, 1), (2, 3)),
        "pp": ((0,), (1,), (2,), (3,)),
    }
    assert distinguishing_axis(plan, {2, 3}, range(4), expert=True) == ("edp", [1])
    assert distinguishing_axis(plan, {1, 3}, range(4), expert=True) == ("ep", [1])
    cut = plan_of(
        model=MIXTRAL, tp=2, dp_shard=2, ep=2, experts=ExpertLayout(expert_tp=2, zero_stage=1)
    )
    assert [axis for axis, _ in named_groups(cut, expert=True)] == [
        "edp_shard",
        "dp_replicate",
        "edp",
        "ep",
        "tp",
        "pp",
    ]
