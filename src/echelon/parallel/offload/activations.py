"""Activations in the memory of the host, from the forward pass that stores them to its backward.

A tensor is copied down beside the computation, in memory that is used again and again, and copied
up when the backward pass comes near. The bits are those of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import ref

import torch

from echelon.parallel.offload.lanes import Lanes, Mark, make_lanes
from echelon.parallel.offload.memory import locked_memory, plain_memory


class HostActivations:
    """Store tensors of forward passes; count what they take."""

    def __init__(self, lanes_of: Callable[[torch.device], Lanes] = make_lanes) -> None:
        """Allocate nothing yet; `lanes_of` makes what copies from and to a device."""
        self._lanes_of = lanes_of
        self._lanes: dict[torch.device, Lanes] = {}
        self._free: dict[int, list[torch.Tensor]] = {}
        self._latest: ref[StoredTensor] | None = None
        self.allocated_bytes = 0
        self.stored_bytes = 0
        self.peak_stored_bytes = 0

    def store(self, x: torch.Tensor, of: object) -> StoredTensor:
        """Copy `x` to the host; `of` is the forward pass, whose backward takes the last first."""
        if x.device not in self._lanes:
            self._lanes[x.device] = self._lanes_of(x.device)
        lanes = self._lanes[x.device]
        memory = self._take(x)
        lanes.share(x)
        host = memory.view(x.dtype).view(x.shape)
        # What is computed waits for all that was copied up, so this comes after the last use of
        # the memory too.
        copied = lanes.copy("down", [(host, x.detach())], [lanes.mark()])
        earlier = self._latest() if self._latest is not None else None
        stored = StoredTensor(
            keeper=self,
            lanes=lanes,
            memory=memory,
            host=host,
            device=x.device,
            copied=copied,
            of=of,
            earlier=ref(earlier) if earlier is not None and earlier.of is of else None,
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
class StoredTensor:
    """A tensor that waits on the host; it is taken once, or never where a graph is dropped.

    `host` looks into `memory`; `earlier` is what the same forward pass (`of`) stored before.
    """

    keeper: HostActivations
    lanes: Lanes
    memory: torch.Tensor | None
    host: torch.Tensor
    device: torch.device
    copied: Mark
    of: object
    earlier: ref[StoredTensor] | None
    brought: tuple[torch.Tensor, Mark] | None = None

    def bring(self) -> None:
        """Start to copy the tensor up; a second call does nothing."""
        if self.brought is not None or self.memory is None:
            return
        x = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
        self.lanes.share(x)
        # The new memory may still be read by what was computed in it before.
        after = [self.copied, self.lanes.mark()]
        self.brought = x, self.lanes.copy("up", [(x, self.host)], after)

    def take(self) -> torch.Tensor:
        """Return the tensor, and start to bring the one that its forward pass stored before."""
        self.bring()
        assert self.brought is not None, "a stored tensor is taken once"
        x, arrived = self.brought
        self.lanes.hold(arrived)
        self._give_back()
        earlier = self.earlier() if self.earlier is not None else None
        if earlier is not None:
            earlier.bring()
        return x

    def _give_back(self) -> None:
        memory, self.memory, self.brought = self.memory, None, None
        if memory is not None:
            self.keeper.give_back(memory)

    def __del__(self) -> None:
        """Give back memory that no backward asked for."""
        self._give_back()
