# SPDX-License-Identifier: Apache-2.0
"""The policy of completion: what a rank's groups, stores, pools and streams are made by.

This one completes operations as the transport does. It is asked once for each thing that it makes,
when a rank is built, so it costs a step nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
import torch.distributed as dist

from echelon.parallel.offload import OffloadPlace, OffloadStore, make_offload_store
from echelon.parallel.offload.host_memory import CopyStreams, make_copy_streams
from echelon.parallel.tensor_memory import BufferPool
from echelon.parallel.transport.collectives import Communicator, Group
from echelon.parallel.transport.recorder import Recorder


class Completion:
    """Make what starts asynchronous operations, each of which completes as soon as it can."""

    @property
    def num_operations(self) -> int:
        """Return how many operations were watched."""
        return 0

    def communicator(self, name: str, ranks: tuple[int, ...], rank: int) -> Communicator | None:
        """Join `ranks`, called `name`; None to a rank that is no member, but must call this too."""
        # Every rank takes part in making every group, its own or not: torch asks for it.
        made = dist.new_group(list(ranks))
        if rank not in ranks:
            return None
        return Communicator(ranks, cast("dist.ProcessGroup", made), name)

    def group(
        self,
        axis: str,
        ranks: Sequence[int],
        communicator: Communicator | None,
        recorder: Recorder,
    ) -> Group:
        """Return the group of `ranks` that the recorder's rank belongs to."""
        return Group(axis, ranks, recorder.rank, communicator, recorder)

    def buffer_pool(self, device: torch.device) -> BufferPool | None:
        """Return what lends memory to buckets that are not always whole, where they need one."""
        # The allocator of a GPU keeps such memory itself.
        return BufferPool(device) if device.type == "cpu" else None

    def offload_store(self, place: OffloadPlace, device: torch.device) -> OffloadStore:
        """An empty store of slices (`make_offload_store`)."""
        return make_offload_store(place, device)

    def copy_streams(self, device: torch.device) -> CopyStreams:
        """Return what copies activations between the host and `device`."""
        return make_copy_streams(device)

    def watching(self) -> AbstractContextManager[None]:
        """Look at what one step does with memory that is in flight; this one does not look."""
        return nullcontext()

    def observing(self) -> AbstractContextManager[None]:
        """Let who looks at a rank between steps await operations, without a trace of it."""
        return nullcontext()

    def close(self) -> None:
        """End what is under way, where nothing else will."""
