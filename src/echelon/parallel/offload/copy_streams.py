# SPDX-License-Identifier: Apache-2.0
"""Copies between host and device beside the computation, one stream for each direction.

What waits for what is said in *marks*: points in the work of a stream or of the computation. On a
CPU there is nothing beside the computation, and a copy is done when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch

CopyDirection = Literal["up", "down"]
"""up: from the host to the device; down: from the device to the host."""

TensorCopy = tuple[torch.Tensor, torch.Tensor]
"""A target and a source."""


class CompletedEvent:
    """The mark of what is done already."""

    def synchronize(self) -> None:
        """Return when the device has come past it: at once."""


StreamEvent = torch.cuda.Event | torch.Event | CompletedEvent
"""A point in the work of the device."""


class CopyStreams:
    """What copies between host and device; this one copies at once, as a CPU does."""

    def copy(
        self, direction: CopyDirection, copies: Sequence[TensorCopy], after: Iterable[StreamEvent]
    ) -> StreamEvent:
        """Copy once the marks are passed; return the mark of the end."""
        for target, source in copies:
            target.copy_(source)
        return CompletedEvent()

    def record_event(self) -> StreamEvent:
        """Return the mark of what the computation has been given to do so far."""
        return CompletedEvent()

    def wait_for(self, mark: StreamEvent) -> None:
        """Let what the computation is given from now on wait for a mark."""

    def record_use(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a device tensor from others until both directions are done with it."""


class CudaCopyStreams(CopyStreams):
    """Copy on two CUDA streams; the computation is on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = {direction: torch.cuda.Stream(device) for direction in ("up", "down")}

    def copy(
        self, direction: CopyDirection, copies: Sequence[TensorCopy], after: Iterable[StreamEvent]
    ) -> StreamEvent:
        """Start to copy; the memory on the host must be locked, or this waits."""
        stream = self._streams[direction]
        for mark in after:
            assert not isinstance(mark, CompletedEvent), "a mark of other streams"
            stream.wait_event(mark)
        with torch.cuda.stream(stream), torch.no_grad():
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        return stream.record_event()

    def record_event(self) -> StreamEvent:
        """Record an event on the current stream."""
        return torch.cuda.current_stream(self.device).record_event()

    def wait_for(self, mark: StreamEvent) -> None:
        """Let the current stream wait for an event."""
        assert not isinstance(mark, CompletedEvent), "a mark of other streams"
        torch.cuda.current_stream(self.device).wait_event(mark)

    def record_use(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that both streams use a tensor."""
        for stream in self._streams.values():
            tensor.record_stream(stream)


def make_copy_streams(device: torch.device) -> CopyStreams:
    """Return the streams between the host and `device`."""
    return CudaCopyStreams(device) if device.type == "cuda" else CopyStreams()
