# SPDX-License-Identifier: Apache-2.0
"""The policy that completes each operation when somebody waits for it, and not before.

Rearranges nothing: ranks send the same bytes in the same order, and a step gives the same bits. See
`in_flight.py` for what it finds. The transport works on private copies in the background, so that
nothing waits longer than it would.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from echelon.parallel.completion.completion import Completion
from echelon.parallel.completion.in_flight import (
    ALL_GATHER,
    InFlight,
    LateOperation,
    OperationName,
    Pair,
    Race,
)
from echelon.parallel.completion.late_memory import (
    LateBufferPool,
    LateCopyStreams,
    LateFileOffloadStore,
)
from echelon.parallel.completion.memory import part_of, private_copy, without
from echelon.parallel.completion.streams import COMPUTE
from echelon.parallel.offload import OffloadPlace, OffloadStore
from echelon.parallel.offload.copying_store import CopyingOffloadStore
from echelon.parallel.offload.host_memory import CopyStreams
from echelon.parallel.offload.store import MemoryOffloadStore
from echelon.parallel.tensor_memory import BufferPool
from echelon.parallel.transport.collectives import (
    Communicator,
    Group,
    Pending,
    ReduceOp,
    require_contiguous,
)
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

    def offload_store(self, place: OffloadPlace, device: torch.device) -> OffloadStore:
        """Return a place whose reads, writes and copies complete late.

        Slices are copied to a device and back, as for a GPU: a place that gives the resting
        tensors themselves has nothing that could be late, and no streams.
        """
        if place.target not in ("host", "nvme"):
            return super().offload_store(place, device)
        side, streams = MemoryOffloadStore("host"), LateCopyStreams(self._flight, "slices")
        if place.target == "nvme":
            side = LateFileOffloadStore(
                place.folder,
                place.rank,
                place.num_buffers,
                self._flight,
                chunk_bytes=place.chunk_bytes,
                settle=streams.settle,
            )
        return CopyingOffloadStore(side, device, streams, num_buffers=place.num_buffers)

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
        access = _access_of(func) if self._flight.watches else None
        if access is None:
            return func(*args, **kwargs)
        used: list[tuple[torch.Tensor, bool]] = []
        for place, value in (*enumerate(args), *kwargs.items()):
            writes = place in access.written
            for tensor in _tensors(value):
                reads = not (writes and access.overwrites)
                self._flight.use(tensor, by=access.name, writes=writes, reads=reads)
                used.append((tensor, writes))
        out = func(*args, **kwargs)
        self._flight.ran(access.name, used, () if access.fills_nothing else _tensors(out))
        return out


@dataclass(frozen=True, slots=True)
class _Access:
    """Say what an operation does with its arguments: which it writes, by place and by name."""

    name: str
    written: frozenset[int | str]
    overwrites: bool
    fills_nothing: bool


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
    overwrites = out or name in _OVERWRITES
    return _Access(name, frozenset(written), overwrites, fills_nothing=name.startswith("empty"))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
        # A DTensor has no memory of its own.
        for name in value.__tensor_flatten__()[0]:
            yield from _tensors(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        values: Iterable[Any] = value
        for one in values:
            yield from _tensors(one)


class LatePending(Pending):
    """A collective whose result appears in `wait`."""

    __slots__ = ("_flight", "_operation", "_real")

    def __init__(self, real: Pending, operation: LateOperation, flight: InFlight) -> None:
        super().__init__()
        self._real, self._operation, self._flight = real, operation, flight

    def done(self) -> bool:
        """Return whether `wait` would return at once, or, at random, that it is not known yet."""
        return self._real.done() and self._flight.random.random() < 1 / 2

    def wait(self) -> None:
        self._flight.land(self._operation)
        self._flight.order.wait(COMPUTE, self._operation.end)


class LateGroup(Group):
    """A group whose collectives complete late."""

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        communicator: Communicator | None,
        recorder: Recorder,
        flight: InFlight,
    ) -> None:
        """Hold the group of `ranks` that the recorder's rank belongs to."""
        super().__init__(axis, ranks, recorder.rank, communicator, recorder)
        self._flight = flight
        self._buffer_pool = LateBufferPool(torch.device("cpu"), flight)

    def all_reduce(
        self, tensor: torch.Tensor, *, name: str, async_op: bool = False, op: ReduceOp = "sum"
    ) -> Pending:
        if self.size == 1:
            return Pending()
        require_contiguous(name, tensor)
        private = private_copy(tensor)
        real = super().all_reduce(private, name=name, async_op=True, op=op)
        return self._late("all_reduce", name, real, [], [(tensor, private)], async_op)

    def all_gather(
        self, whole: torch.Tensor, shard: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        if self.size == 1:
            return super().all_gather(whole, shard, name=name, async_op=async_op)
        require_contiguous(name, whole, shard)
        landing, sent = torch.empty_like(whole), private_copy(shard)
        real = super().all_gather(landing, sent, name=name, async_op=True)
        return self._late(ALL_GATHER, name, real, [(shard, sent)], [(whole, landing)], async_op)

    def reduce_scatter(
        self, shard: torch.Tensor, whole: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        if self.size == 1:
            return super().reduce_scatter(shard, whole, name=name, async_op=async_op)
        require_contiguous(name, whole, shard)
        landing, sent = torch.empty_like(shard), private_copy(whole)
        real = super().reduce_scatter(landing, sent, name=name, async_op=True)
        # In place, it fills a part of the tensor that it reads.
        reads = [(part, part_of(sent, whole, part)) for part in without(whole, [shard])]
        return self._late("reduce_scatter", name, real, reads, [(shard, landing)], async_op)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        """Send part i of `sent` to member i; its part is i of `received`."""
        if self.size == 1:
            return super().all_to_all(received, sent, name=name, async_op=async_op)
        require_contiguous(name, received, sent)
        landing, leaving = torch.empty_like(received), private_copy(sent)
        real = super().all_to_all(landing, leaving, name=name, async_op=True)
        return self._late(
            "all_to_all", name, real, [(sent, leaving)], [(received, landing)], async_op
        )

    def exchange(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], *, name: str
    ) -> Pending:
        if self.size == 1:
            return Pending()
        require_contiguous(name, *sends.values(), *receives.values())
        leaving = {place: private_copy(tensor) for place, tensor in sends.items()}
        landing = {place: torch.empty_like(tensor) for place, tensor in receives.items()}
        real = super().exchange(leaving, landing, name=name)
        reads = [(tensor, leaving[place]) for place, tensor in sends.items()]
        writes = [(tensor, landing[place]) for place, tensor in receives.items()]
        return self._late("exchange", name, real, reads, writes, True)

    def send(self, tensor: torch.Tensor, index: int, *, name: str, tag: int) -> Pending:
        require_contiguous(name, tensor)
        private = private_copy(tensor)
        real = super().send(private, index, name=name, tag=tag)
        return self._late("send", name, real, [(tensor, private)], [], True)

    def receive(self, tensor: torch.Tensor, index: int, *, name: str, tag: int) -> Pending:
        require_contiguous(name, tensor)
        private = torch.empty_like(tensor)
        real = super().receive(private, index, name=name, tag=tag)
        return self._late("receive", name, real, [], [(tensor, private)], True)

    def _late(
        self,
        kind: str,
        name: str,
        real: Pending,
        reads: Sequence[Pair],
        writes: Sequence[Pair],
        async_op: bool,
    ) -> Pending:
        called = OperationName(kind=kind, name=name, axis=self.axis)
        # Each communicator has a stream, and here each message.
        stream = f"{self.axis} {name}" if kind in ("send", "receive") else self.axis
        order = self._flight.order
        order.give(stream, order.moment(COMPUTE))
        operation = self._flight.begin(called, real.wait, reads=reads, writes=writes, stream=stream)
        pending = LatePending(real, operation, self._flight)
        if not async_op:
            pending.wait()
        return pending
