"""What a place of a ring holds and passes on: rows where they lie, and routes that agree."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from echelon.core.attention_mask import AttentionMask, Placement, PositionRun
from echelon.layout.ring_plan import BlockRows, ring_plan
from echelon.layout.ring_transfers import RowTransfer

CAUSAL = AttentionMask()
STRIPED = Placement(kind="striped", ring_degree=4, ulysses_degree=1, length=16)


def test_rows_are_found_where_the_tensor_has_them() -> None:
    block = BlockRows.from_rows((PositionRun(0, 1, 4), PositionRun(20, 1, 4)), ((1, 3), (5, 8)))
    assert block.count == 5
    assert block.runs == (PositionRun(1, 1, 2), PositionRun(21, 1, 3))
    assert block.slices_of(((2, 3),)) == [slice(1, 2)]
    # Rows that are apart at the owner lie side by side here.
    assert block.slices_of(((1, 3), (5, 6))) == [slice(0, 3)]
    assert block.slices_of(((1, 2), (6, 8))) == [slice(0, 1), slice(3, 5)]
    with pytest.raises(AssertionError, match="rows 3 to 5 are not in"):
        block.slices_of(((3, 5),))


def test_without_a_window_a_block_goes_around_the_whole_ring() -> None:
    for place in range(4):
        plan = ring_plan(STRIPED, CAUSAL, place)
        assert [plan.owner_at(step) for step in range(4)] == [(place + s) % 4 for s in range(4)]
        assert plan.own.count == 4
        assert set(plan.blocks) == set(range(4)) - {place}
        assert plan.key_steps == {1, 2, 3}
        for step, transfers in plan.keys.items():
            assert all(one.step == step for one in transfers)
            assert all(place in (one.source, one.target) for one in transfers)
        assert plan.rows_from(place) is plan.own


def test_what_one_place_sends_its_target_expects() -> None:
    plans = [ring_plan(STRIPED, CAUSAL, place) for place in range(4)]
    for kind in ("keys", "gradients"):
        for place, plan in enumerate(plans):
            moves: Mapping[int, tuple[RowTransfer, ...]] = getattr(plan, kind)
            for step, transfers in moves.items():
                for one in transfers:
                    other = one.target if one.source == place else one.source
                    assert one in getattr(plans[other], kind)[step]
