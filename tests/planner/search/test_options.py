"""What a mesh leaves open: ways to share out, and schedules."""

from __future__ import annotations

from echelon.planner.search.options import (
    NodeOfRanks,
    ZeroOption,
    pinned_zero_options,
    schedule_options,
    zero_options,
)
from echelon.planner.search.pins import Pins
from echelon.planner.search.rounding import EXACT, Rounding


def test_two_data_ranks_are_replicas_or_share_out() -> None:
    assert zero_options(2, 1, 1, 1, offload=False) == (
        ZeroOption(0, 2, 1),
        ZeroOption(1, 1, 2),
        ZeroOption(2, 1, 2),
        ZeroOption(3, 1, 2),
        ZeroOption(3, 1, 2, reshard=0),
    )
    assert zero_options(1, 1, 1, 1, offload=False) == (ZeroOption(0, 1, 1),)
    assert zero_options(1, 1, 1, 1, offload=True) == (
        ZeroOption(1, 1, 1, offload=1),
        ZeroOption(2, 1, 1, offload=1),
    )


def test_pins_leave_what_they_let_through_and_units_are_gathered_twice_unpinned() -> None:
    found = pinned_zero_options(Pins(), (2, 1, 1, 1), offload=False)
    assert all(one.reshard for one in found)
    pins = Pins().having("zero", 3).having("reshard", 0)
    assert pinned_zero_options(pins, (2, 1, 1, 1), offload=False) == (ZeroOption(3, 1, 2, 0),)


def test_one_rank_has_one_order_and_two_have_several() -> None:
    (alone,) = schedule_options(Pins(), 1, 8)
    assert (alone.name, alone.virtual, alone.allows(1)) == ("1f1b", 1, True)
    assert schedule_options(Pins().having("virtual", 2), 1, 8) == ()
    several = schedule_options(Pins(), 2, 8)
    assert {"1f1b", "interleaved-1f1b", "zb-h1"} <= {one.name for one in several}
    (gpipe,) = [one for one in several if one.name == "gpipe"]
    assert gpipe.allows(1)
    assert not gpipe.allows(8), "1f1b waits as much and holds less"
    assert all(one.virtual * 2 <= 8 for one in several)


def test_one_rank_needs_no_schedule_that_a_trainer_has() -> None:
    (alone,) = schedule_options(Pins(limits={"schedule": ("gpipe",)}), 1, 8)
    assert alone.name == "1f1b"
    assert schedule_options(Pins().having("schedule", "gpipe"), 1, 8) == ()


def test_nodes_keep_slices_where_each_holds_several_of_the_ranks_and_none_all() -> None:
    node = NodeOfRanks(devices=8, tp=2)
    kept = [one for one in zero_options(16, 1, 1, 2, offload=False, node=node) if one.secondary]
    assert kept == [
        ZeroOption(3, 2, 8, secondary=1),
        ZeroOption(3, 1, 16, secondary=1),
    ]
    for alone in (NodeOfRanks(devices=8, tp=8), NodeOfRanks(devices=8, tp=3), NodeOfRanks()):
        options = zero_options(16, 1, 1, 2, offload=False, node=alone)
        assert not any(one.secondary for one in options)


def test_what_rounds_is_there_only_where_it_can_be_had() -> None:
    gathers, sums = Rounding(gather="int8", int8_block=128), Rounding(reduce="int8")
    node, key = NodeOfRanks(devices=2), (4, 1, 1, 1)
    exact = pinned_zero_options(Pins(), key, offload=False, node=node)
    assert {one.rounding for one in exact} == {EXACT}
    both = pinned_zero_options(Pins(), key, offload=False, node=node, roundings=[gathers, sums])
    assert {one.zero for one in both if one.rounding == gathers} == {3}
    assert {(one.zero, one.dp_shard) for one in both if one.rounding == sums} == {
        (1, 4),
        (2, 4),
        (3, 4),
    }
