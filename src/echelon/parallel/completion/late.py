# SPDX-License-Identifier: Apache-2.0
"""The policy that completes each operation when somebody waits for it, and not before.

Rearranges nothing: ranks send the same bytes in the same order, and a step gives the same bits. See
`in_flight.py` for what it finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.core.plan import OffloadTarget
from echelon.models.piece_sizes import TRAINING_PIECES
from echelon.parallel.completion.completion import Completion
from echelon.parallel.completion.in_flight import InFlight, Race
from echelon.parallel.completion.late_group import LateGroup
from echelon.parallel.completion.late_memory import (
    LateBufferPool,
    LateCopyStreams,
    LateFileOffloadStore,
)
from echelon.parallel.offload import OffloadStore
from echelon.parallel.offload.copy_streams import CopyStreams
from echelon.parallel.offload.copying_store import CopyingOffloadStore
from echelon.parallel.offload.store import MemoryOffloadStore
from echelon.parallel.tensor_memory import BufferPool
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.communicator import Communicator
from echelon.parallel.transport.recorder import Recorder

_LOOKS_AT_NOTHING = frozenset(
    {
        "_unsafe_view",
        "empty_like",
        "full_like",
        "is_pinned",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "record_stream",
        "resize_",
        "set_",
        "sym_size",
        "zeros_like",
    }
)
"""Operations that take shapes, dtypes and storages of tensors, and no elements."""

_OVERWRITES = frozenset({"copy_", "fill_", "normal_", "uniform_", "zero_"})
"""Operations in place that do not read what they write."""


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


class InFlightWatch(TorchDispatchMode):
    """Tell a ledger of every tensor whose elements an operation reads or writes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and torch would import its compiler to say so."""
        return False

    def __init__(self, flight: InFlight) -> None:
        """Watch for `flight`."""
        super().__init__()
        self._flight = flight

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Look at the tensors, then run the operation."""
        kwargs = kwargs or {}
        if self._flight.watches:
            access = _access_of(func)
            if access is not None:
                for place, value in (*enumerate(args), *kwargs.items()):
                    writes = place in access.written
                    for tensor in _tensors(value):
                        self._flight.use(
                            tensor,
                            by=access.name,
                            writes=writes,
                            reads=not (writes and access.overwrites),
                        )
        return func(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Access:
    """Say what an operation does with its arguments: which it writes, by place and by name."""

    name: str
    written: frozenset[int | str]
    overwrites: bool


@cache
def _access_of(func: Any) -> _Access | None:
    """Return how an operation uses memory; None where it looks at no elements."""
    schema = func._schema
    name = schema.name.rpartition("::")[2]
    if func.is_view or name in _LOOKS_AT_NOTHING:
        return None
    written: set[int | str] = set()
    out = False
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {place, argument.name}
            out = out or argument.is_out
    return _Access(name, frozenset(written), out or name in _OVERWRITES)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        values: Iterable[Any] = value
        for one in values:
            yield from _tensors(one)
