"""Keys reach everyone who needs them, in time, and nobody else; gradients all come home."""

from __future__ import annotations

import pytest

from echelon.core.attention_mask import AttentionMask, Placement, PlacementKind
from echelon.layout.ring_transfers import RingTransfers, direct_transfers, num_rows, ring_transfers

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
