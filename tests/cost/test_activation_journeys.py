"""Rows on their way to experts and home: what is there at each end, and chunks that overlap."""

from __future__ import annotations

from echelon.cost.activation_journeys import (
    Chunk,
    Hop,
    Motion,
    RowBytes,
    backward_bytes,
    departed,
    forward_bytes,
    landing_bytes,
)

EACH = RowBytes(row=100, gate=4, top_k=2)


def motion(size: int) -> Motion:
    """Return a motion whose rows are as many on their way as at both ends."""
    return Motion(starts=size, flying=size, arrives=2 * size, lands=size)


def chunk(rows: int = 1000) -> Chunk:
    """Return a chunk that sends as many bytes as it keeps, with an inner activation of a tenth."""
    one = motion(rows)
    return Chunk(
        out=one, home=one, back=one, last=one, rows=rows, gates=0, inner=100, forward=0, backward=0
    )


def test_rows_are_there_twice_while_they_are_put_in_order() -> None:
    # 5 leave, of which 2 stay; 6 are here in the end: 5 + 4 on their way, then 6 more.
    found = EACH.scatter(Hop(leaving=5, here=6, stays=2), 1)
    assert (found.flying, found.arrives, found.lands) == (9 * 104, 15 * 104, 6 * 104)
    home = EACH.collect(Hop(leaving=5, here=6, stays=2), 4, 0)
    # 6 + 3 on their way, then 5 in order, and 4 sums with two int64 each.
    assert (home.flying, home.arrives, home.lands) == (900, 900 + 500 + 4 * 116, 400)


def test_alone_nothing_is_copied_but_sums() -> None:
    hop = Hop(leaving=5, here=5, stays=5, alone=True)
    assert EACH.scatter(hop, 0).arrives == 500
    home = EACH.collect(hop, 4, 0)
    assert home.holds
    assert (home.starts, home.arrives) == (0, 500 + 4 * 116)


def test_two_hops_keep_what_crossed_until_all_is_there() -> None:
    across, within = Hop(leaving=4, here=6, stays=2), Hop(leaving=8, here=7, stays=3)
    found = EACH.scatter_twice(across, within, 0)
    assert found.flying == (4 + 6 - 2) * 100
    assert found.arrives == (8 + 6) * 100 + (8 + 7 - 3 + 7) * 100
    assert found.lands == 700


def test_padded_rows_are_let_go_when_they_are_sent() -> None:
    there = EACH.padded(10, 0, alone=False, copies=True)
    assert (there.flying, there.arrives, there.lands) == (2100, 2100, 1000)
    as_they_are = EACH.padded(10, 0, alone=True, copies=False)
    assert (as_they_are.flying, as_they_are.lands) == (1100, 1100)


def test_a_second_chunk_is_under_way_while_the_first_is_at_work() -> None:
    one, two = (chunk(),), (chunk(), chunk())
    assert departed(two) == 2 * departed(one) == 2000
    # Rows 1000, gate and up 200, output 1000, on their way home 1000, put in order 2000.
    assert forward_bytes(one, graph=True) == 1000 + 200 + 1000 + 2 * 1000
    # All rows and inner ones, the last output, what came home, and that put together.
    assert forward_bytes(two, graph=True) == 2 * 1200 + 1000 + 2 * 2000
    # Without a graph the last rows alone.
    assert forward_bytes(two, graph=False) == 1000 + 1000 + 2 * 2000


def test_weight_gradients_keep_what_they_need_until_rows_are_waited_for() -> None:
    kept = 1000 + 1000 + 3 * 100
    left = backward_bytes((chunk(),), put_off=True, product=50, split=False)
    assert (left.departs, left.put_off) == (1000, kept)
    # With what experts kept gone: rows on their way, and what was put off.
    assert left.flying == 1000
    assert landing_bytes((chunk(),), left, 50) == max(1000 + kept + 50, 2000)
    at_once = backward_bytes((chunk(),), put_off=False, product=50, split=False)
    assert (at_once.put_off, at_once.flying) == (0, 1000)
    later = backward_bytes((chunk(), chunk()), put_off=True, product=50, split=True)
    assert (later.put_off, later.flying) == (0, 2000)
