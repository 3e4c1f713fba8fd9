"""How many chunks a place of a ring holds: its own, the one at work, and the one on its way."""

from __future__ import annotations

import pytest

from echelon.core.attention_mask import AttentionMask, Placement, PlacementKind
from echelon.layout.context_resident import resident_chunks, resident_rows
from echelon.layout.ring_plan import ring_plan

CAUSAL, FULL = AttentionMask(), AttentionMask(causal=False)
MASKS = [CAUSAL, FULL, AttentionMask(window=5), AttentionMask(causal=False, window=30)]


def place_of(kind: PlacementKind, n: int, length: int = 48) -> Placement:
    return Placement(kind=kind, ring_degree=n, ulysses_degree=1, length=length)


@pytest.mark.parametrize("n", [3, 4, 8])
def test_three_chunks_are_there_or_two_where_each_transfer_is_waited_for(n: int) -> None:
    for placement in (place_of("zigzag", n), place_of("striped", n)):
        assert resident_chunks(placement, FULL) == 3
        assert resident_chunks(placement, FULL, overlapped=False) == 2
    # A causal zigzag place meets the whole of earlier places, half of later ones.
    assert resident_chunks(place_of("zigzag", n), CAUSAL) == 3
    assert resident_chunks(place_of("zigzag", 2), FULL) == 2


def test_a_short_window_holds_little_more_than_its_own_chunk() -> None:
    found = resident_chunks(place_of("zigzag", 4, 4096), AttentionMask(window=33))
    assert found == 1 + 32 / 1024


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_place_holds_what_its_course_says(
    kind: PlacementKind, n: int, mask: AttentionMask
) -> None:
    placement = place_of(kind, n)
    for place in range(n):
        course = ring_plan(placement, mask, place)
        size = {owner: block.count for owner, block in course.blocks.items()}
        held: set[int] = set()
        for resident in resident_rows(placement, mask, place)[:n]:
            arriving = course.keys.get(resident.step + 1, ())
            held |= {hop.owner for hop in arriving if hop.target == place}
            assert resident.keys == sum(size[owner] for owner in held)
            at_work = course.owner_at(resident.step)
            assert resident.working == (size[at_work] if at_work in held else 0)
            held = {owner for owner in held if course.last_use[owner] > resident.step}
        assert not held


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("kind", ["zigzag", "striped"])
def test_gradients_stay_until_all_of_a_block_have_left(
    kind: PlacementKind, mask: AttentionMask
) -> None:
    n, placement = 4, place_of(kind, 4)
    for place in range(n):
        course = ring_plan(placement, mask, place)
        held: set[int] = set()
        met: set[int] = set()
        for resident in resident_rows(placement, mask, place):
            step, owner = resident.step, course.owner_at(resident.step)
            hops = course.gradients.get(step, ())
            held |= {hop.owner for hop in hops if hop.owner != place}
            met |= {hop.owner for hop in course.keys.get(step, ()) if hop.target == place}
            held |= {owner} & met
            rows = sum(course.blocks[one].count for one in held)
            assert resident.gradients == course.own.count + rows
            arriving = [hop for hop in hops if hop.target == place]
            wanted = sum(b - a for hop in arriving for a, b in hop.rows)
            assert resident.gradient_copies >= wanted
            held = {one for one in held if course.last_leaving[one] > step}
        assert not held
