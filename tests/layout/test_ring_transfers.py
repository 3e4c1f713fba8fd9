"""Keys reach everyone who needs them, in time, and nobody else; gradients all come home."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from echelon.core.attention_mask import AttentionMask, Placement, PlacementKind, PositionRun
from echelon.layout.ring_transfers import (
    BlockRows,
    RingTransfers,
    RowTransfer,
    direct_transfers,
    num_rows,
    resident_chunks,
    resident_rows,
    ring_plan,
    ring_transfers,
)

CAUSAL, FULL = AttentionMask(), AttentionMask(causal=False)
MASKS = [
    CAUSAL,
    FULL,
    *(AttentionMask(window=w) for w in (1, 2, 3, 7, 20, 200)),
    *(AttentionMask(causal=False, window=w) for w in (1, 5, 30)),
]
LENGTH = 48


def place_of(kind: PlacementKind, n: int) -> Placement:
    return Placement(kind=kind, ring_degree=n, ulysses_degree=1, length=LENGTH)


def rows_needed(where: Placement, mask: AttentionMask, place: int, owner: int) -> set[int]:
    """The rows of the owner whose position some query of the place meets, one by one."""
    queries = [run.position(i) for run in where.ring_runs(place) for i in range(run.count)]
    keys = [run.position(i) for run in where.ring_runs(owner) for i in range(run.count)]
    return {row for row, key in enumerate(keys) if any(mask.allows(q, key) for q in queries)}


def rows_of(ranges: tuple[tuple[int, int], ...]) -> set[int]:
    return {row for start, stop in ranges for row in range(start, stop)}


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_keys_are_there_in_time(kind: PlacementKind, n: int, mask: AttentionMask) -> None:
    where = place_of(kind, n)
    routes = ring_transfers(where, mask)
    has: dict[tuple[int, int], set[int]] = {(p, p): set(range(LENGTH // n)) for p in range(n)}
    since: dict[tuple[int, int], int] = {(p, p): 0 for p in range(n)}
    for hop in routes.keys:
        assert hop.source != hop.target
        assert hop.step == (hop.owner - hop.target) % n
        # What is handed on at a step has come at an earlier one.
        assert since[hop.source, hop.owner] < hop.step
        assert rows_of(hop.rows) <= has[hop.source, hop.owner]
        has.setdefault((hop.target, hop.owner), set()).update(rows_of(hop.rows))
        since[hop.target, hop.owner] = hop.step
    for place in range(n):
        for owner in range(n):
            if place != owner:
                needed = rows_needed(where, mask, place, owner)
                stated = rows_of(routes.needs.get((place, owner), ()))
                assert needed <= stated <= has.get((place, owner), set())
                # Nobody gets what has no use for it, there or further on.
                assert bool(needed) == ((place, owner) in has)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("n", [2, 3, 4, 6])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("routes_of", [ring_transfers, direct_transfers])
def test_gradients_come_home_once(
    kind: PlacementKind, n: int, mask: AttentionMask, routes_of
) -> None:  # type: ignore[no-untyped-def]
    """Each visitor's rows, counted along the hops, are at the owner once per visitor."""
    routes: RingTransfers = routes_of(place_of(kind, n), mask)
    held = {
        (place, owner): {row: 1 for row in rows_of(rows)}
        for (place, owner), rows in routes.needs.items()
    }
    home: dict[int, dict[int, int]] = {owner: {} for owner in range(n)}
    for step in range(1, n + 1):
        for hop in (one for one in routes.gradients if one.step == step):
            assert routes_of is direct_transfers or step > (hop.owner - hop.source) % n
            mine = held[hop.source, hop.owner]
            into = home[hop.owner] if hop.target == hop.owner else held[hop.target, hop.owner]
            for row in rows_of(hop.rows):
                into[row] = into.get(row, 0) + mine.pop(row, 0)
    assert not any(count for rows in held.values() for count in rows.values())
    for owner in range(n):
        wanted: dict[int, int] = {}
        for (_, whose), rows in routes.needs.items():
            if whose == owner:
                for row in rows_of(rows):
                    wanted[row] = wanted.get(row, 0) + 1
        assert home[owner] == wanted


def total(routes: RingTransfers) -> int:
    return sum(num_rows(hop.rows) for hop in routes.keys)


def test_full_attention_sends_every_chunk_around_the_ring_to_neighbours() -> None:
    n = 4
    for kind in ("contiguous", "zigzag", "striped"):
        routes = ring_transfers(place_of(kind, n), FULL)
        assert all((hop.source - hop.target) % n == 1 for hop in routes.keys)
        assert all((hop.source - hop.target) % n == 1 for hop in routes.gradients)
        assert total(routes) == n * (n - 1) * LENGTH // n


def test_zigzag_sends_a_quarter_less_where_the_future_is_hidden() -> None:
    n = 4
    zigzag = ring_transfers(place_of("zigzag", n), CAUSAL)
    assert total(zigzag) == n * (n - 1) * LENGTH // n * 3 // 4
    assert total(ring_transfers(place_of("striped", n), CAUSAL)) == n * (n - 1) * LENGTH // n
    assert all((hop.source - hop.target) % n == 1 for hop in zigzag.keys)


def test_a_window_shorter_than_a_chunk_sends_its_own_length_to_the_next_chunk() -> None:
    n, window = 4, 5
    routes = ring_transfers(place_of("contiguous", n), AttentionMask(window=window))
    assert [num_rows(hop.rows) for hop in routes.keys] == [window - 1] * (n - 1)
    zigzag = ring_transfers(place_of("zigzag", n), AttentionMask(window=window))
    # 2n chunks have 2n - 1 borders, one of them inside of the last place.
    assert total(zigzag) == (2 * n - 2) * (window - 1)
    assert total(ring_transfers(place_of("zigzag", n), AttentionMask(window=1))) == 0


RESIDENT_MASKS = [CAUSAL, FULL, AttentionMask(window=5), AttentionMask(causal=False, window=30)]


def resident_place(kind: PlacementKind, n: int, length: int = 48) -> Placement:
    return Placement(kind=kind, ring_degree=n, ulysses_degree=1, length=length)


@pytest.mark.parametrize("n", [3, 4, 8])
def test_three_chunks_are_there_or_two_where_each_transfer_is_waited_for(n: int) -> None:
    for placement in (
        resident_place("zigzag", n),
        resident_place("striped", n),
    ):
        assert resident_chunks(placement, FULL) == 3
        assert resident_chunks(placement, FULL, overlapped=False) == 2
    # A causal zigzag place meets the whole of earlier places, half of later ones.
    assert resident_chunks(resident_place("zigzag", n), CAUSAL) == 3
    assert resident_chunks(resident_place("zigzag", 2), FULL) == 2


def test_a_short_window_holds_little_more_than_its_own_chunk() -> None:
    found = resident_chunks(resident_place("zigzag", 4, 4096), AttentionMask(window=33))
    assert found == 1 + 32 / 1024


@pytest.mark.parametrize("mask", RESIDENT_MASKS, ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_place_holds_what_its_course_says(
    kind: PlacementKind, n: int, mask: AttentionMask
) -> None:
    placement = resident_place(kind, n)
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


@pytest.mark.parametrize("mask", RESIDENT_MASKS, ids=str)
@pytest.mark.parametrize("kind", ["zigzag", "striped"])
def test_gradients_stay_until_all_of_a_block_have_left(
    kind: PlacementKind, mask: AttentionMask
) -> None:
    n, placement = 4, resident_place(kind, 4)
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


CAUSAL_MASK = AttentionMask()
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
        plan = ring_plan(STRIPED, CAUSAL_MASK, place)
        assert [plan.owner_at(step) for step in range(4)] == [(place + s) % 4 for s in range(4)]
        assert plan.own.count == 4
        assert set(plan.blocks) == set(range(4)) - {place}
        assert plan.key_steps == {1, 2, 3}
        for step, transfers in plan.keys.items():
            assert all(one.step == step for one in transfers)
            assert all(place in (one.source, one.target) for one in transfers)
        assert plan.rows_from(place) is plan.own


def test_what_one_place_sends_its_target_expects() -> None:
    plans = [ring_plan(STRIPED, CAUSAL_MASK, place) for place in range(4)]
    for kind in ("keys", "gradients"):
        for place, plan in enumerate(plans):
            moves: Mapping[int, tuple[RowTransfer, ...]] = getattr(plan, kind)
            for step, transfers in moves.items():
                for one in transfers:
                    other = one.target if one.source == place else one.source
                    assert one in getattr(plans[other], kind)[step]
