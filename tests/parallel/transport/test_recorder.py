"""Actions have the times of the device that ran them, on the clock of the host."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from echelon.core.event import EventList
from echelon.parallel.transport.collectives import Group, Pending
from echelon.parallel.transport.messages import PendingWorks
from echelon.parallel.transport.recorder import CudaClock, Recorder, clock_of


@dataclass(frozen=True, slots=True)
class SleepingWork(PendingWorks):
    """An operation that takes so long to be waited for."""

    works: Sequence[dist.Work] = ()
    tensors: Iterable[torch.Tensor] = ()
    seconds: float = 0.0

    def wait(self) -> None:
        """Sleep."""
        time.sleep(self.seconds)


class LateDevice:
    """A device that comes to each mark a second after the one before, however fast it is fed."""

    def __init__(self) -> None:
        """Start now."""
        self.zero, self.marks, self.asked = time.perf_counter(), 0, list[object]()
        self.restarts = 0

    def mark(self) -> int:
        """Queue a mark."""
        self.marks += 1
        return self.marks

    def restart(self) -> None:
        """Set the clock anew, which must not change what the host's clock says."""
        self.restarts += 1

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
    assert device.restarts == 1
    recorder.settle()
    first, second = events.events[2:]
    assert (first.kind, first.name, first.stage, first.microbatch) == ("F", "F1.0", 1, 0)
    assert (second.kind, second.name, second.rank) == ("BW", "BW1.1", 2)
    assert abs(first.end - first.start - 1.0) < 1e-9
    assert abs(second.start - first.end - 1.0) < 1e-9
    assert abs(first.start - 1.0) < 0.5


def test_a_wait_is_told_by_its_collective_and_by_the_action_that_needed_a_message() -> None:
    """S46: with their axis; a wait for a message is no part of the action."""
    events = EventList()
    recorder = Recorder(1, events)
    group = Group("dp", [0, 1], 1, None, recorder)
    record = group._event("all_reduce", "bucket", 8, recorder.now(), 3)
    Pending(SleepingWork(seconds=0.02), record, name="bucket", recorder=recorder).wait()
    Pending(SleepingWork(seconds=0.03), recorder.received, name="message", recorder=recorder).wait()
    with recorder.action("F", 0, 0):
        Pending(SleepingWork(seconds=0.01), record, name="bucket", recorder=recorder).wait()
    with recorder.action("F", 0, 1):
        pass
    outside, inside, first, second = events.events
    assert (outside.axis, outside.bytes, inside.axis) == ("dp", 8, "dp")
    assert 0.02 <= outside.waited_s <= outside.end - outside.start
    assert 0.01 <= inside.waited_s < 0.02 + first.end - first.start
    assert first.waited_s >= 0.03
    assert second.waited_s == 0.0
    assert recorder.waited_s >= 0.06


def test_a_late_device_tells_for_how_long_its_queue_stood_still() -> None:
    """S46: the host's wait returns at once; marks around it tell the wait when the step ends."""
    events, device = EventList(), LateDevice()
    recorder = Recorder(0, events, clock=cast(CudaClock, device))
    group = Group("dp", [0, 1], 0, None, recorder)
    record = group._event("all_reduce", "bucket", 8, recorder.now(), 3)
    Pending(SleepingWork(seconds=0.0), record, name="bucket", recorder=recorder).wait()
    Pending(SleepingWork(seconds=0.0), recorder.received, name="message", recorder=recorder).wait()
    with recorder.action("F", 0, 0):
        pass
    assert events.events == []
    recorder.settle()
    collective, action = events.events
    assert collective.kind == "all_reduce"
    assert abs(collective.waited_s - 1.0) < 1e-9
    assert collective.end - collective.start < 0.5, "when the host launched and awaited it"
    assert abs(action.waited_s - 1.0) < 1e-9
    assert abs(action.end - action.start - 1.0) < 1e-9


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


class LongRunningDevice:
    """A GPU that has run for a day: its events tell distances in float32 milliseconds."""

    def __init__(self, now_s: float) -> None:
        """Stand at this time."""
        self.now_s = now_s

    def event(self, *, enable_timing: bool) -> LongRunningDevice.Mark:
        """Make an event."""
        assert enable_timing
        return LongRunningDevice.Mark(self)

    class Mark:
        """One event."""

        def __init__(self, device: LongRunningDevice) -> None:
            self.device, self.at_s = device, 0.0

        def record(self, stream: object) -> None:
            """Pass at once: the stream has nothing to do."""
            self.at_s = self.device.now_s

        def synchronize(self) -> None:
            """Return at once."""

        def elapsed_time(self, end: LongRunningDevice.Mark) -> float:
            """Return what `cudaEventElapsedTime` gives."""
            return float(np.float32(1000.0 * (end.at_s - self.at_s)))


def test_after_a_day_the_times_of_a_device_are_as_fine_as_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    day_s = 86_400.0
    device = LongRunningDevice(0.0)
    monkeypatch.setattr("torch.cuda.Event", device.event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: None)
    monkeypatch.setattr("time.perf_counter", lambda: device.now_s)
    events = EventList()
    clock = clock_of(torch.device("cuda", 0))
    recorder = Recorder(0, events, clock=clock)
    for start_s in (day_s, day_s + 10.0):
        device.now_s = start_s
        with recorder.action("F", 0, 0):
            device.now_s += 0.0013
        recorder.settle()
    first, second = events.events
    assert abs(first.end - first.start - 0.0013) > 1e-3, "the first is told from a day before"
    assert abs(second.end - second.start - 0.0013) < 2e-6
    assert abs(second.start - (day_s + 10.0)) < 2e-6


def test_a_cpu_is_on_the_clock_of_the_host() -> None:
    assert clock_of(torch.device("cpu")) is None
    events = EventList()
    recorder = Recorder(0, events)
    with recorder.action("F", 0, 3):
        pass
    assert [event.name for event in events.events] == ["F0.3"]
