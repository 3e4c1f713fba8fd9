"""Rows on their way to experts and home: what is there at each end, and chunks that overlap."""

from __future__ import annotations

from echelon.cost.activations.dispatch import (
    DispatchChunk,
    HopRows,
    RowBytes,
    TransferBytes,
    arrival_bytes,
    backward_bytes,
    bytes_in_flight,
    forward_bytes,
)

EACH = RowBytes(row=100, gate=4, top_k=2)


def motion(size: int) -> TransferBytes:
    """Return a motion whose rows are as many on their way as at both ends."""
    return TransferBytes(at_start=size, in_flight=size, at_arrival=2 * size, arrived=size)


def chunk(rows: int = 1000) -> DispatchChunk:
    """Return a chunk that sends as many bytes as it keeps, with an inner activation of a tenth."""
    one = motion(rows)
    return DispatchChunk(
        dispatch=one,
        combine=one,
        back=one,
        last=one,
        rows=rows,
        gates=0,
        inner=100,
        forward=0,
        backward=0,
    )


def test_rows_are_there_twice_while_they_are_put_in_order() -> None:
    # 5 leave, of which 2 stay; 6 are here in the end: 5 + 4 on their way, then 6 more.
    found = EACH.scatter(HopRows(leaving=5, arriving=6, staying=2), 1)
    assert (found.in_flight, found.at_arrival, found.arrived) == (9 * 104, 15 * 104, 6 * 104)
    home = EACH.collect(HopRows(leaving=5, arriving=6, staying=2), 4, 0)
    # 6 + 3 on their way, then 5 in order, and 4 sums with two int64 each.
    assert (home.in_flight, home.at_arrival, home.arrived) == (900, 900 + 500 + 4 * 116, 400)


def test_alone_nothing_is_copied_but_sums() -> None:
    hop = HopRows(leaving=5, arriving=5, staying=5, alone=True)
    assert EACH.scatter(hop, 0).at_arrival == 500
    home = EACH.collect(hop, 4, 0)
    assert home.holds
    assert (home.at_start, home.at_arrival) == (0, 500 + 4 * 116)


def test_two_hops_keep_what_crossed_until_all_is_there() -> None:
    across, within = (
        HopRows(leaving=4, arriving=6, staying=2),
        HopRows(leaving=8, arriving=7, staying=3),
    )
    found = EACH.scatter_twice(across, within, 0)
    assert found.in_flight == (4 + 6 - 2) * 100
    assert found.at_arrival == (8 + 6) * 100 + (8 + 7 - 3 + 7) * 100
    assert found.arrived == 700


def test_padded_rows_are_let_go_when_they_are_sent() -> None:
    there = EACH.padded(10, 0, alone=False, copies=True)
    assert (there.in_flight, there.at_arrival, there.arrived) == (2100, 2100, 1000)
    as_they_are = EACH.padded(10, 0, alone=True, copies=False)
    assert (as_they_are.in_flight, as_they_are.arrived) == (1100, 1100)


def test_a_second_chunk_is_under_way_while_the_first_is_at_work() -> None:
    one, two = (chunk(),), (chunk(), chunk())
    assert bytes_in_flight(two) == 2 * bytes_in_flight(one) == 2000
    # Rows 1000, gate and up 200, output 1000, on their way home 1000, put in order 2000.
    assert forward_bytes(one, graph=True) == 1000 + 200 + 1000 + 2 * 1000
    # All rows and inner ones, the last output, what came home, and that put together.
    assert forward_bytes(two, graph=True) == 2 * 1200 + 1000 + 2 * 2000
    # Without a graph the last rows alone.
    assert forward_bytes(two, graph=False) == 1000 + 1000 + 2 * 2000


def test_weight_gradients_keep_what_they_need_until_rows_are_waited_for() -> None:
    kept = 1000 + 1000 + 3 * 100
    left = backward_bytes((chunk(),), deferred=True, product=50, split=False)
    assert (left.departing_peak, left.deferred) == (1000, kept)
    # With what experts kept gone: rows on their way, and what was put off.
    assert left.in_flight == 1000
    assert arrival_bytes((chunk(),), left, 50) == max(1000 + kept + 50, 2000)
    at_once = backward_bytes((chunk(),), deferred=False, product=50, split=False)
    assert (at_once.deferred, at_once.in_flight) == (0, 1000)
    later = backward_bytes((chunk(), chunk()), deferred=True, product=50, split=True)
    assert (later.deferred, later.in_flight) == (0, 2000)
