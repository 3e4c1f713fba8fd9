"""The walk of a place: shared by those that are alike, and the same as one of its own."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.activations.from_plan import activation_numbers_from_plan
from echelon.cost.peak.messages import message_counts
from echelon.cost.peak.place_walk import HighestMoment, PlaceWalk
from echelon.cost.peak.rank_peak import TERMS, PeakWalk, rank_peak
from echelon.layout.stage import part_of
from echelon.schedule.from_plan import schedule_from_plan

PIPELINE = ("mesh.pp=4", "model.layers=8", "batch.global_sequences=32")
ZERO = ("mesh.dp_shard=2", "zero.stage=3")


def plan_of(*flags: str) -> Plan:
    return load_job("nano", flags).plan


def walk_of(plan: Plan, rank: int) -> PlaceWalk:
    return PlaceWalk(plan, rank, activation_numbers_from_plan(plan), dict.fromkeys(TERMS, 0.0))


def highest(plan: Plan, walk: PlaceWalk, rank: int) -> HighestMoment:
    pp = plan.mesh.coordinates(rank)[Axis.PP]
    row = schedule_from_plan(plan).actions[pp]
    return walk.highest(row, message_counts(plan)[pp], part_of(plan, rank))


@pytest.mark.parametrize("flags", [(), ZERO, ("mesh.dp_shard=2", "zero.stage=2")])
def test_a_place_that_is_alike_takes_the_walk_of_another(flags: tuple[str, ...]) -> None:
    plan = plan_of(*PIPELINE, *flags)
    second, third = (stage * plan.mesh.world_size // 4 for stage in (1, 2))
    shared = walk_of(plan, second)
    own = highest(plan, shared, second)
    other = highest(plan, shared, third)
    assert other == highest(plan, walk_of(plan, third), third)
    # The third place has fewer microbatches in flight than the second, and blocks of its own.
    assert own.terms["activations"] > other.terms["activations"]
    assert own.where != other.where
    assert highest(plan, shared, second) == own


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ZERO,
        ("pipeline.schedule=interleaved-1f1b", "pipeline.virtual_stages=2", *ZERO),
        ("recompute.policy=full", "recompute.every=2"),
        ("optimizer.kind=muon", "mesh.dp_shard=2", "zero.stage=1"),
    ],
)
def test_peaks_found_together_are_those_of_each_rank_alone(flags: tuple[str, ...]) -> None:
    plan = plan_of(*PIPELINE, *flags)
    together = PeakWalk(plan).by_place()
    assert together == [rank_peak(plan, one.rank) for one in together]


def test_units_are_called_by_the_blocks_of_the_rank_that_asks() -> None:
    plan = plan_of(*PIPELINE)
    for stage, one in enumerate(PeakWalk(plan).by_place()):
        blocks = {f"layers.{block}" for block in plan.layout.pipeline.stages[stage]}
        assert one.where.split(", ")[1] in {*blocks, "head"}
