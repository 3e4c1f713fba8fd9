"""What a fingerprint and the evidence of a rank answer."""

from __future__ import annotations

from dataclasses import replace

from echelon.launch.desync.fingerprint import Activity, partners
from tests.launch.desync.programs import one_group, run_of

PIPE = {"pipe": [(0, 1)]}


def test_a_send_and_its_receive_are_one_message() -> None:
    sent = run_of(0, ["pipe send act 8 float32 >1"], PIPE).fingerprints[0]
    received = run_of(1, ["pipe receive act 8 float32 <0"], PIPE).fingerprints[0]
    assert sent.channel == received.channel
    assert sent.content == received.content
    assert sent.place_in_program != received.place_in_program
    assert partners(sent) == (0, 1)


def test_a_rank_has_called_what_it_began_or_began_later() -> None:
    calls = ["dp all_reduce a 1 float32", "dp all_reduce b 1 float32"]
    both, first = run_of(0, calls, one_group(2)), run_of(1, calls[:1], one_group(2))
    assert both.has_called(first.fingerprints[0])
    assert not first.has_called(both.fingerprints[1])
    assert first.last == first.waiting
    assert partners(both.fingerprints[0]) == (0, 1)
    # What was issued behind the first unfinished operation of a device has not begun.
    behind = replace(both, counts_until=1)
    assert not behind.has_called(both.fingerprints[1])


def test_a_rank_that_does_something_else_waits_in_nothing() -> None:
    one = run_of(0, ["dp all_reduce a 1 float32"], one_group(2), Activity.RUNS)
    assert one.waiting is None
    assert one.last is not None
    assert replace(one, activity=Activity.WAITS, waits_for=9).waiting is None
    assert replace(one, fingerprints=()).last is None
