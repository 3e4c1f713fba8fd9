"""What a plan asks of its user is counted: axes first, machinery after."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.mesh import Mesh
from echelon.planner.recommend.simplicity import complexity, machinery, splitting_axes
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.search.search import search
from tests.planner.requests import small


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
