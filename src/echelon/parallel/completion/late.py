# SPDX-License-Identifier: Apache-2.0
"""The policy that completes each operation when somebody waits for it, and not before.

Rearranges nothing: ranks send the same bytes in the same order, and a step gives the same bits. See
`in_flight.py` for what it finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from echelon.core.plan import OffloadTarget
from echelon.models.piece_sizes import TRAINING_PIECES
from echelon.parallel.completion.completion import Completion
from echelon.parallel.completion.in_flight import InFlight
from echelon.parallel.completion.late_copies import LateCopyStreams
from echelon.parallel.completion.late_files import LateFileOffloadStore
from echelon.parallel.completion.late_group import LateGroup
from echelon.parallel.completion.late_memory import LateBufferPool
from echelon.parallel.completion.race import Race
from echelon.parallel.completion.watch import InFlightWatch
from echelon.parallel.offload import OffloadStore
from echelon.parallel.offload.copy_streams import CopyStreams
from echelon.parallel.offload.copying_store import CopyingOffloadStore
from echelon.parallel.offload.store import MemoryOffloadStore
from echelon.parallel.tensor_memory import BufferPool
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.communicator import Communicator
from echelon.parallel.transport.recorder import Recorder


class LateCompletion(Completion):
    """Make what completes late, and watch the steps of one rank."""

    def __init__(self, rank: int, seed: int, races: Path) -> None:
        """Draw from `seed`, another sequence on each rank; write each race into a file at once."""
        races.touch()
        self._races = races
        self._flight = InFlight(rank, seed, self._tell)

    @property
    def num_operations(self) -> int:
        """Return how many operations have begun."""
        return self._flight.num_operations

    def group(
        self,
        axis: str,
        ranks: Sequence[int],
        communicator: Communicator | None,
        recorder: Recorder,
    ) -> Group:
        """Return a group whose collectives and messages complete late."""
        return LateGroup(axis, ranks, communicator, recorder, self._flight)

    def buffer_pool(self, device: torch.device) -> BufferPool | None:
        """Return a pool whose free memory is poisoned."""
        return LateBufferPool(device, self._flight)

    def offload_store(
        self,
        home: OffloadTarget,
        device: torch.device,
        *,
        folder: Path,
        rank: int,
        num_buffers: int,
        chunk_bytes: int = TRAINING_PIECES.file_bytes,
    ) -> OffloadStore:
        """Return a place whose reads, writes and copies complete late.

        What rests on the host is copied to where it is used and back, as for a GPU: a place that
        gives the resting tensors themselves has nothing that could be late.
        """
        if home == "host":
            side, streams = MemoryOffloadStore("host"), LateCopyStreams(self._flight, "slices")
            return CopyingOffloadStore(side, device, streams, num_buffers=num_buffers)
        if home == "nvme":
            return LateFileOffloadStore(
                folder, rank, num_buffers, self._flight, chunk_bytes=chunk_bytes
            )
        return super().offload_store(
            home,
            device,
            folder=folder,
            rank=rank,
            num_buffers=num_buffers,
            chunk_bytes=chunk_bytes,
        )

    def copy_streams(self, device: torch.device) -> CopyStreams:
        """Return what copies activations late."""
        return LateCopyStreams(self._flight, "activations")

    def observing(self) -> AbstractContextManager[None]:
        """Let who looks at a rank see results without waiting on its behalf."""
        return self._flight.observing()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch one step."""
        with InFlightWatch(self._flight):
            yield
        self._flight.end_step()

    def close(self) -> None:
        """Wait until the transport has ended what nobody waits for any more."""
        self._flight.close()

    def _tell(self, race: Race) -> None:
        with self._races.open("a", encoding="utf-8") as file:
            file.write(race.to_json() + "\n")
