"""Events: one record, kept or dropped, summed by axis."""

from __future__ import annotations

import json

from echelon.core.event import Event, EventList, NoEvents

SEND = Event(kind="send", name="activation 0", axis="pp", stage=0, microbatch=1, bytes=64, rank=2)
ACTION = Event(kind="F", name="F0.1", stage=0, microbatch=1, start=0.5, end=1.0)


def test_an_event_is_a_json_object() -> None:
    assert json.loads(json.dumps(SEND.to_json())) == {
        "kind": "send",
        "name": "activation 0",
        "axis": "pp",
        "stage": 0,
        "microbatch": 1,
        "bytes": 64,
        "start": 0.0,
        "end": 0.0,
        "rank": 2,
        "waited_s": 0.0,
    }


def test_bytes_by_axis_counts_what_has_an_axis() -> None:
    events = EventList()
    for event in (SEND, ACTION, SEND, Event(kind="all_reduce", name="x", axis="tp", bytes=8)):
        events.record(event)
    assert events.events[1] is ACTION
    assert events.bytes_by_axis() == {"pp": 128, "tp": 8}


def test_a_list_keeps_its_own_events() -> None:
    one, other = EventList(), EventList()
    one.record(SEND)
    assert other.events == []


def test_no_events_keeps_nothing() -> None:
    assert NoEvents().record(SEND) is None
