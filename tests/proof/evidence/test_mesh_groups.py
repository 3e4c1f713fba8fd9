"""The groups of ranks that share something, by the name of their axis."""

from __future__ import annotations

from echelon.core.axis import SHARD_AXES
from echelon.core.experts import ExpertLayout
from echelon.proof.evidence.mesh import (
    group_of,
    grouped_axes,
    index_in_group,
    named_groups,
    shard_axis,
)
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.proof.layouts import layout

HYBRID = layout(dp=4, tp=2, zero={"stage": 2}, mesh={"dp_replicate": 2, "dp_shard": 2})


def test_slices_are_cut_over_data_and_context_ranks() -> None:
    split = layout(mesh={"cp": 2, "dp_shard": 2}, zero={"stage": 2})
    assert shard_axis(split) == "dp_shard and cp"
    alone = layout(mesh={"cp": 2})
    assert [axis for axis, _ in grouped_axes(alone)] == ["cp", "cp", "tp", "pp"]
    assert shard_axis(layout(mesh={"cp": 2}, zero={"stage": 1})) == "cp"
    assert shard_axis(HYBRID) == "dp_shard"


def test_a_rank_has_a_place_in_its_group() -> None:
    groups = dict(named_groups(HYBRID))
    assert group_of(groups["dp_shard"], 7) == (5, 7)
    assert index_in_group(HYBRID, 7, SHARD_AXES) == 1


def test_ranks_that_hold_the_same_experts_come_first() -> None:
    # Expert groups are 0 1 and 2 3; ranks 0 and 2 hold the same experts.
    plan = plan_of(model=MIXTRAL, dp_shard=4, ep=2)
    assert dict(named_groups(plan, expert=True)) == {
        "edp": ((0, 2), (1, 3)),
        "ep": ((0, 1), (2, 3)),
        "pp": ((0,), (1,), (2,), (3,)),
    }
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
