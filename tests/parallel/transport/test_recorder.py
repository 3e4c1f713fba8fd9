"""Actions have the times of the device that ran them, on the clock of the host."""

from __future__ import annotations

import time
from typing import cast

import torch

from echelon.core.event import EventList
from echelon.parallel.transport.recorder import CudaClock, Recorder, clock_of


class LateDevice:
    """A device that comes to each mark a second after the one before, however fast it is fed."""

    def __init__(self) -> None:
        """Start now."""
        self.zero, self.marks, self.asked = time.perf_counter(), 0, list[object]()

    def mark(self) -> int:
        """Queue a mark."""
        self.marks += 1
        return self.marks

    def at(self, mark: object) -> float:
        """Return when it was passed."""
        assert isinstance(mark, int)
        self.asked.append(mark)
        return self.zero + mark


def test_actions_of_a_late_device_are_written_with_its_times_when_the_step_has_ended() -> None:
    events, device = EventList(), LateDevice()
    recorder = Recorder(2, events, clock=cast(CudaClock, device))
    for microbatch, kind in enumerate(("F", "BW")):
        with recorder.action(kind, 1, microbatch):
            recorder.record("send", "inside", start=recorder.now())
    assert [event.name for event in events.events] == ["inside", "inside"]
    assert device.asked == []
    recorder.settle()
    recorder.settle()
    first, second = events.events[2:]
    assert (first.kind, first.name, first.stage, first.microbatch) == ("F", "F1.0", 1, 0)
    assert (second.kind, second.name, second.rank) == ("BW", "BW1.1", 2)
    assert abs(first.end - first.start - 1.0) < 1e-9
    assert abs(second.start - first.end - 1.0) < 1e-9
    assert abs(first.start - 1.0) < 0.5


def test_an_action_that_fails_is_written_too() -> None:
    events, device = EventList(), LateDevice()
    recorder = Recorder(0, events, clock=cast(CudaClock, device))
    try:
        with recorder.action("F", 0, 0):
            raise ValueError
    except ValueError:
        recorder.settle()
    assert [event.name for event in events.events] == ["F0.0"]
    assert (recorder.stage, recorder.microbatch) == (None, None)


def test_a_cpu_is_on_the_clock_of_the_host() -> None:
    assert clock_of(torch.device("cpu")) is None
    events = EventList()
    recorder = Recorder(0, events)
    with recorder.action("F", 0, 3):
        pass
    assert [event.name for event in events.events] == ["F0.3"]
