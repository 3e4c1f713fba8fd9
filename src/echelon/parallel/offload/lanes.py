"""Copies between host and device beside the computation, one lane for each direction.

What waits for what is said in *marks*: points in the work of a lane or of the computation. On a
CPU there is nothing beside the computation, and a copy is done when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import torch

Lane = Literal["up", "down"]
"""up: from the host to the device; down: from the device to the host."""

Copy = tuple[torch.Tensor, torch.Tensor]
"""A target and a source."""


class Mark(Protocol):
    """A point in the work of the device."""

    def synchronize(self) -> None:
        """Return when the device has come past it."""
        ...


class Lanes(Protocol):
    """What copies between host and device."""

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Iterable[Mark]) -> Mark:
        """Copy once the marks are passed; return the mark of the end."""
        ...

    def mark(self) -> Mark:
        """Return the mark of what the computation has been given to do so far."""
        ...

    def hold(self, mark: Mark) -> None:
        """Let what the computation is given from now on wait for a mark."""
        ...

    def share(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a device tensor from others until both lanes are done with it."""
        ...


class Passed:
    """The mark of what is done already."""

    def synchronize(self) -> None:
        """Return at once."""


class DirectLanes:
    """Copy at once: what a CPU does."""

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Iterable[Mark]) -> Mark:
        """Copy; nothing is ever under way."""
        for target, source in copies:
            target.copy_(source)
        return Passed()

    def mark(self) -> Mark:
        """Return a mark that is passed."""
        return Passed()

    def hold(self, mark: Mark) -> None:
        """Do nothing."""

    def share(self, tensor: torch.Tensor) -> None:
        """Do nothing."""


class CudaLanes:
    """Copy on two CUDA streams; the computation is on the current stream."""

    def __init__(self, device: torch.device) -> None:
        """Make the streams."""
        self.device = device
        self._streams = {lane: torch.cuda.Stream(device) for lane in ("up", "down")}

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Iterable[Mark]) -> Mark:
        """Start to copy; the memory on the host must be locked, or this waits."""
        stream = self._streams[lane]
        for mark in after:
            stream.wait_event(_event(mark))
        with torch.cuda.stream(stream), torch.no_grad():
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        return stream.record_event()

    def mark(self) -> Mark:
        """Record an event on the current stream."""
        return torch.cuda.current_stream(self.device).record_event()

    def hold(self, mark: Mark) -> None:
        """Let the current stream wait for an event."""
        torch.cuda.current_stream(self.device).wait_event(_event(mark))

    def share(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that both streams use a tensor."""
        for stream in self._streams.values():
            tensor.record_stream(stream)


def _event(mark: Mark) -> torch.cuda.Event:
    assert isinstance(mark, torch.cuda.Event), "a mark of other lanes"
    return mark


def make_lanes(device: torch.device) -> Lanes:
    """Return the lanes between the host and `device`."""
    return CudaLanes(device) if device.type == "cuda" else DirectLanes()
