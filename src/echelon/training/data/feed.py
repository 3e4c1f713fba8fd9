# SPDX-License-Identifier: Apache-2.0
"""Give each step its batches, on a GPU copied there while the step before computes.

Two sets of buffers on the device take turns. The host reads the loss at the end of every step, so
when the batches of step n + 1 are copied, nothing reads those of step n - 1 any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from echelon.models.batch import TokenBatch
from echelon.parallel.offload.host_memory import CopyStreams, StreamEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What is under way to the device, and the mark of its arrival."""

    step: int
    batches: Sequence[TokenBatch]
    sources: Sequence[torch.Tensor]
    arrived: StreamEvent


class BatchFeed:
    """Load the batches of each step and bring them to the device."""

    def __init__(
        self,
        load: Callable[[int], Sequence[TokenBatch]],
        device: torch.device,
        streams: CopyStreams,
        *,
        num_steps: int,
    ) -> None:
        """Take what `load` returns of a step, on the host, for each of so many steps."""
        self._load, self._device, self._streams = load, device, streams
        self._num_steps = num_steps
        self._buffers: list[list[torch.Tensor]] = [[], []]
        self._prepared: _Prepared | None = None

    def prepare(self, step: int) -> None:
        """Load what `step` reads and start to copy it, unless it is past the last one.

        Called when the device has been given the work of the step before, so that it does not wait
        for the disk either. On a CPU nothing runs beside the computation, and `take` loads.
        """
        if self._device.type == "cpu" or step >= self._num_steps:
            return
        batches = self._load(step)
        sources = [tensor.pin_memory() for one in batches for tensor in one.tensors()]
        after: list[StreamEvent] = []
        buffers = self._buffers[step % 2]
        if [one.shape for one in buffers] != [one.shape for one in sources]:
            # Fresh memory may be that of something which the computation still reads.
            buffers[:] = [torch.empty_like(one, device=self._device) for one in sources]
            after.append(self._streams.record_event())
        arrived = self._streams.copy("up", list(zip(buffers, sources, strict=True)), after)
        filled = iter(buffers)
        self._prepared = _Prepared(
            step=step,
            batches=[one.moved([next(filled) for _ in one.tensors()]) for one in batches],
            sources=sources,
            arrived=arrived,
        )

    def take(self, step: int) -> Sequence[TokenBatch]:
        """Return the batches of `step`; what the device is given next waits for them."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.step != step:
            return [one.to(self._device) for one in self._load(step)]
        self._streams.wait_for(prepared.arrived)
        return prepared.batches
