"""Which groups sum gradients: all who see different tokens, copies of a slice, and of experts."""

from __future__ import annotations

import pytest

from echelon.config.derived.replicas import (
    EXPERT_SLICES,
    SLICES,
    groups_of_algorithm,
    read_collectives,
    summing_groups,
)
from echelon.config.plan_view import view_from_plan
from echelon.core.experts import ExpertLayout
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.proof.layouts import layout
from tests.proof.run.collectives import summed

GROUPS = {
    "alone": (layout(), {}),
    "replicas": (layout(dp=4), {"the same parameters": (0, 1, 2, 3)}),
    "context": (layout(mesh={"cp": 2}), {"the same parameters": (0, 1)}),
    "slices": (layout(dp=2, zero={"stage": 1}), {SLICES: (0, 1)}),
    "rows": (layout(tp=4), {"pieces of the same layers": (0, 1, 2, 3)}),
    "both ends": (layout(pp=4, tied=True), {"the embedding at both ends": (0, 3)}),
    "ends apart": (layout(pp=4), {}),
    "hybrid": (
        layout(dp=4, zero={"stage": 2}, mesh={"dp_replicate": 2, "dp_shard": 2}),
        {"copies of a slice": (0, 2), SLICES: (0, 1)},
    ),
    "experts": (
        plan_of(model=MIXTRAL, dp_shard=4, ep=2),
        {"the same parameters": (0, 1, 2, 3), "the same experts": (0, 2)},
    ),
    "slices of experts": (
        plan_of(model=MIXTRAL, dp_shard=4, ep=2, experts=ExpertLayout(zero_stage=1)),
        {"the same parameters": (0, 1, 2, 3), EXPERT_SLICES: (0, 2)},
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_that_sum(name: str) -> None:
    plan, groups = GROUPS[name]
    assert summing_groups(view_from_plan(plan)) == groups


def test_a_tree_does_nothing_for_slices() -> None:
    view = view_from_plan(GROUPS["hybrid"][0])
    assert list(groups_of_algorithm(view, "tree")) == ["copies of a slice"]
    assert groups_of_algorithm(view, "ring") == summing_groups(view)


def test_what_a_plan_says_is_read_back() -> None:
    plan = summed(dp=4, each=2)
    found, derived = read_collectives(view_from_plan(plan), plan.cluster)
    assert (found, derived) == (plan.layout.collectives, {})
