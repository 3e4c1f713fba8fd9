"""The time at which a device comes to a point of its queue, on the clock of the host.

A GPU runs what it was given later than the host gives it, so what the host's clock says of an
action is when it was launched. A mark is an event in the queue; when the device has passed it, its
distance from the first mark is known. Marks cost microseconds and wait for nothing.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch


class DeviceClock(Protocol):
    """Whoever knows when a device came to a mark."""

    def mark(self) -> object:
        """Put a mark into the queue of the device."""
        ...

    def at(self, mark: object) -> float:
        """Return when the device came to a mark, on the host's `perf_counter`; waits for it."""
        ...


class CudaClock:
    """The clock of the stream that computes on one GPU."""

    def __init__(self, device: torch.device) -> None:
        """Set the clock: the device must have nothing to do, so that both clocks meet."""
        self._device = device
        torch.cuda.synchronize(device)
        self._first = self.mark()
        self._first.synchronize()
        self._zero = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """Put an event into the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def at(self, mark: object) -> float:
        """Return when the device came to `mark`, in seconds of `perf_counter`."""
        assert isinstance(mark, torch.cuda.Event), "a mark of this clock"
        mark.synchronize()
        return self._zero + self._first.elapsed_time(mark) / 1000.0


def clock_of(device: torch.device) -> DeviceClock | None:
    """Return the clock of a device that runs behind the host; None where the host's is right."""
    return CudaClock(device) if device.type == "cuda" else None
