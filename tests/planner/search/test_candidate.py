"""A candidate as settings and pins, and the best of many."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np

from echelon.core.mesh import Mesh
from echelon.planner.search.candidate import (
    BestCandidates,
    CandidatePlan,
    ScoredCandidate,
    best_of_groups,
    complexity,
    machinery,
    splitting_axes,
)
from echelon.planner.search.options import RecomputeOption, ScheduleOption, ZeroOption
from echelon.planner.search.search import search
from tests.planner.requests import small

CHOICE = CandidatePlan(
    mesh=Mesh(dp_shard=4, tp=2),
    sequence_parallel=True,
    context="ring",
    ulysses=1,
    expert_tp=1,
    microbatch=2,
    microbatches=3,
    zero=1,
    reshard=True,
    offload=False,
    schedule="1f1b",
    virtual=1,
    recompute=0,
    recomputed_share=0.0,
)


def test_settings_without_effect_are_left_out() -> None:
    found = CHOICE.settings(has_experts=False)
    assert (found["mesh.tp"], found["zero.stage"]) == (2, 1)
    assert not {key for key in found if key.startswith(("context.", "recompute.", "experts."))}
    more = replace(CHOICE, zero=3, recompute=2, offload=True).settings(has_experts=True)
    assert more["zero.reshard_after_forward"] == "always"
    assert (more["recompute.policy"], more["recompute.every"]) == ("full", 2)
    assert (more["zero.optimizer_offload"], more["mesh.ep"]) == ("host", 1)


def test_a_value_is_told_as_a_pin_says_it() -> None:
    names = ("tp", "dp", "devices", "zero", "schedule", "sequence_parallel", "offload", "recompute")
    words = ["2", "4", "8", "1", "1f1b", "on", "none", "none"]
    assert [CHOICE.pin_value(name) for name in names] == words
    assert replace(CHOICE, recompute=2).pin_value("recompute") == "full/2"
    assert replace(CHOICE, reshard=False).pin_value("reshard") == "never"


def test_of_each_group_the_least_is_found() -> None:
    values, groups = np.array([3.0, 1.0, 2.0, 5.0]), np.array([1, 1, 0, 0])
    assert best_of_groups(values, groups).tolist() == [2, 1]


def _scored(value: float) -> ScoredCandidate:
    return ScoredCandidate(
        value=value,
        columns={},
        row=0,
        zero_option=ZeroOption(0, 1, 1),
        schedule_option=ScheduleOption("1f1b", 1, 1, 1),
        recompute=RecomputeOption(0, 0.0),
    )


def test_the_bar_is_the_last_that_is_kept() -> None:
    best = BestCandidates(keep=2)
    for row, value in enumerate((4.0, 2.0, 3.0)):
        best.add((8, row, 0, 1), _scored(value))
    best.add((8, 0, 0, 1), _scored(5.0))
    assert best.threshold == inf
    best.drop_surplus()
    assert best.threshold == 3.0
    assert [one.value for one in best.ranked()] == [2.0, 3.0]


def plain() -> CandidatePlan:
    answer = search(small(pins=["tp=1", "pp=1", "cp=1", "recompute=none", "dp_replicate=1"]))
    return answer.first.candidate


def test_data_parallelism_and_a_stage_of_zero_are_plain() -> None:
    one = plain()
    assert one.mesh.dp == 8
    assert splitting_axes(one) == ()
    assert machinery(one) == ()
    assert complexity(one) == complexity(replace(one, zero=3)) == (0, 0)


def test_axes_weigh_more_than_machinery() -> None:
    one = plain()
    tensor = replace(one, mesh=Mesh(tp=2, dp_shard=4), sequence_parallel=True)
    assert splitting_axes(tensor) == ("tp",)
    busy = replace(
        one,
        mesh=Mesh(dp_replicate=2, dp_shard=4),
        recompute=1,
        offload=True,
        virtual=2,
        expert_tp=2,
    )
    assert machinery(busy) == (
        "several stages on a rank",
        "replicas of shards",
        "pieces of experts",
        "recompute",
        "offload",
    )
    assert complexity(one) < complexity(busy) < complexity(tensor)


def test_a_schedule_counts_where_there_is_a_pipeline() -> None:
    one = replace(plain(), schedule="zb-h1")
    assert machinery(one) == ()
    assert machinery(replace(one, mesh=Mesh(pp=2, dp_shard=4))) == ("zb-h1",)
