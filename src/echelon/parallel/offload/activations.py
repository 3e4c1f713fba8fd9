# SPDX-License-Identifier: Apache-2.0
"""Activations in the memory of the host, from the forward pass that stores them to its backward.

A tensor is copied down beside the computation, in memory that is used again and again, and copied
up when the backward pass comes near. The bits are those of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import ref

import torch

from echelon.parallel.offload.buffers import locked_memory, plain_memory
from echelon.parallel.offload.copy_streams import CopyStreams, StreamEvent, make_copy_streams


class HostActivations:
    """Store tensors of forward passes; count what they take."""

    def __init__(
        self, make_streams: Callable[[torch.device], CopyStreams] = make_copy_streams
    ) -> None:
        """Allocate nothing yet; `make_streams` makes what copies from and to a device."""
        self._make_streams = make_streams
        self._streams: dict[torch.device, CopyStreams] = {}
        self._free: dict[int, list[torch.Tensor]] = {}
        self._latest: ref[OffloadedActivation] | None = None
        self.allocated_bytes = 0
        self.stored_bytes = 0
        self.peak_stored_bytes = 0

    def store(self, x: torch.Tensor, forward_pass: object) -> OffloadedActivation:
        """Copy `x` to the host for the backward of `forward_pass`, which takes the last first."""
        if x.device not in self._streams:
            self._streams[x.device] = self._make_streams(x.device)
        streams = self._streams[x.device]
        memory = self._take(x)
        streams.record_use(x)
        host = memory.view(x.dtype).view(x.shape)
        # What is computed waits for all that was copied up, so this comes after the last use of
        # the memory too.
        copied = streams.copy("down", [(host, x.detach())], [streams.record_event()])
        earlier = self._latest() if self._latest is not None else None
        stored = OffloadedActivation(
            activations=self,
            streams=streams,
            memory=memory,
            host=host,
            device=x.device,
            copied=copied,
            forward_pass=forward_pass,
            earlier=ref(earlier)
            if earlier is not None and earlier.forward_pass is forward_pass
            else None,
        )
        self._latest = ref(stored)
        self.stored_bytes += memory.nbytes
        self.peak_stored_bytes = max(self.peak_stored_bytes, self.stored_bytes)
        return stored

    def give_back(self, memory: torch.Tensor) -> None:
        """Use memory for another tensor."""
        self.stored_bytes -= memory.nbytes
        self._free.setdefault(memory.nbytes, []).append(memory)

    def _take(self, x: torch.Tensor) -> torch.Tensor:
        free = self._free.get(x.nbytes)
        if free:
            return free.pop()
        memory = (locked_memory if x.is_cuda else plain_memory)(x.nbytes)
        self.allocated_bytes += memory.untyped_storage().nbytes()
        return memory


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class OffloadedActivation:
    """A tensor that waits on the host; it is taken once, or never where a graph is dropped."""

    activations: HostActivations
    """What stores all of them."""
    streams: CopyStreams
    """The streams of copies."""
    memory: torch.Tensor | None
    """Memory on the host; None once it is given back."""
    host: torch.Tensor
    """A view of `memory` with the shape and dtype of the tensor."""
    device: torch.device
    """The device that it goes back to."""
    copied: StreamEvent
    """When it has left the device."""
    forward_pass: object
    """The forward pass that stored it."""
    earlier: ref[OffloadedActivation] | None
    """What the same forward pass stored before."""
    brought: tuple[torch.Tensor, StreamEvent] | None = None
    """The tensor on the device again and when it is complete, once it was fetched."""

    def start_copy(self) -> None:
        """Start to copy the tensor up; a second call does nothing."""
        if self.brought is not None or self.memory is None:
            return
        x = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
        self.streams.record_use(x)
        # The new memory may still be read by what was computed in it before.
        after = [self.copied, self.streams.record_event()]
        self.brought = x, self.streams.copy("up", [(x, self.host)], after)

    def take(self) -> torch.Tensor:
        """Return the tensor, and start to bring the one that its forward pass stored before."""
        self.start_copy()
        assert self.brought is not None, "a stored tensor is taken once"
        x, arrived = self.brought
        self.streams.wait_for(arrived)
        self._give_back()
        earlier = self.earlier() if self.earlier is not None else None
        if earlier is not None:
            earlier.start_copy()
        return x

    def _give_back(self) -> None:
        memory, self.memory, self.brought = self.memory, None, None
        if memory is not None:
            self.activations.give_back(memory)

    def __del__(self) -> None:
        """Give back memory that no backward asked for."""
        self._give_back()
