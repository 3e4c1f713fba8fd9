# SPDX-License-Identifier: Apache-2.0
"""Groups that write down what they are asked for, and send nothing.

What comes from other ranks has the right shape and no elements, so tensors must be on the meta
device. Small objects come back as if every rank had given the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from echelon.cost.bytes.terms import (
    all_gather_bytes,
    all_reduce_bytes,
    all_to_all_bytes,
    reduce_scatter_bytes,
)
from echelon.parallel.completion.completion import Completion
from echelon.parallel.completion.streams import COMPUTE, StreamWork
from echelon.parallel.offload import OffloadPlace, OffloadStore
from echelon.parallel.offload.host_memory import CopyStreams
from echelon.parallel.offload.store import MemoryOffloadStore
from echelon.parallel.tensor_memory import BufferPool
from echelon.parallel.transport.algorithms import gather_steps_of, scatter_steps_of
from echelon.parallel.transport.collectives import (
    Communicator,
    Group,
    Pending,
    ReduceOp,
    require_contiguous,
)
from echelon.parallel.transport.recorder import Recorder, WaitTime
from echelon.rehearsal.memory import (
    BUFFERS,
    MeteredPool,
    RehearsedCopyStreams,
    RehearsedOffloadStore,
    where_in_package,
)
from echelon.rehearsal.order import RECEIVE, SEND, ExchangePart, Issue, RankLog
from echelon.rehearsal.shapes import ShapesOnly

NOT_COUNTED = ""
"""The dtype of an exchange of tensors of any sizes."""


class RehearsedCommunicator(Communicator):
    """The members of groups that never meet; what opens them is written down."""

    def __init__(self, name: str, ranks: Sequence[int], log: RankLog) -> None:
        """Stand for `ranks`; `name` is what this rank calls it."""
        self.name, self.ranks, self.log = name, tuple(ranks), log
        self.is_gloo = False

    def open(self, recorder: Recorder, axis: str) -> None:
        """Write down the call in which all members come together."""
        del recorder
        number = self.log.issue(
            Issue(
                communicator=self.name,
                members=self.ranks,
                kind="all_reduce",
                num_bytes=4,
                dtype="float32",
                name=axis,
            )
        )
        self.log.wait(number)

    def open_links(self, pairs: Iterable[tuple[int, int]], recorder: Recorder) -> None:
        """Write down the first message over each link of this rank."""
        index = self.ranks.index(recorder.rank)
        for pair in pairs:
            if index in pair:
                first, second = (self.ranks[place] for place in pair)
                kind = SEND if index == pair[0] else RECEIVE
                number = self.log.issue(
                    Issue(
                        communicator=self.name,
                        members=(min(first, second), max(first, second)),
                        kind=kind,
                        num_bytes=4,
                        dtype="float32",
                        name="link",
                    )
                )
                self.log.wait(number)


class _Logged(Pending):
    """An operation that was written down; so is the wait for it, and then its event."""

    __slots__ = ("_end", "_issue", "_record", "_shapes")

    def __init__(
        self,
        shapes: ShapesOnly,
        issue: int,
        record: Callable[[WaitTime | None], None] | None = None,
        *,
        stream: str,
    ) -> None:
        super().__init__()
        self._shapes, self._issue, self._record = shapes, issue, record
        self._end = shapes.order.moment(stream) if shapes.order.follows else {}

    def done(self) -> bool:
        """Return False: on a GPU nobody knows before the wait."""
        return False

    def wait(self) -> None:
        """Write the wait down; a second one is none."""
        if self._issue >= 0:
            self._shapes.log.wait(self._issue)
            self._shapes.flight.end(self._issue)
            self._shapes.order.wait(COMPUTE, self._end)
            if self._record is not None:
                self._record(None)
        self._issue = -1


@dataclass(frozen=True, slots=True)
class _Use:
    """What an operation reads and writes; members compare the bytes and the dtype of `whole`."""

    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]
    whole: torch.Tensor | None
    parts: tuple[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]] = ({}, {})
    """Tensors that an exchange sends and receives, by the place of the other member."""


class RehearsedGroup(Group):
    """A group whose operations are written into the log of its rank."""

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        communicator: RehearsedCommunicator,
        recorder: Recorder,
        shapes: ShapesOnly,
    ) -> None:
        """Hold the group of `ranks` that the recorder's rank belongs to."""
        super().__init__(axis, ranks, recorder.rank, None, recorder)
        self.communicator = self._logged = communicator
        self._shapes = shapes
        self._workspace: torch.Tensor | None = None

    def all_reduce(
        self, tensor: torch.Tensor, *, name: str, async_op: bool = False, op: ReduceOp = "sum"
    ) -> Pending:
        """Write down a sum of `tensor`, or the search for its largest elements."""
        largest = all_reduce_bytes(tensor.nbytes, self.size)
        sent = largest if op == "max" else self._sum_bytes(tensor)
        used = _Use((), (tensor,), tensor)
        far = self._far_of_sum(tensor, op)
        return self._issue("all_reduce", name, used, sent, far, async_op=async_op)

    def all_gather(
        self, whole: torch.Tensor, shard: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        """Write down that `whole` is filled with the pieces of all ranks."""
        self._check_slice(whole, shard, name)
        sent = all_gather_bytes(shard.nbytes, self.size)
        used = _Use((shard,), (whole,), whole)
        far = self._far_of_slices(gather_steps_of, whole, shard.nbytes)
        return self._issue("all_gather", name, used, sent, far, async_op=async_op)

    def reduce_scatter(
        self, shard: torch.Tensor, whole: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        """Write down that `shard` is filled with a part of a sum."""
        self._check_slice(whole, shard, name)
        sent = reduce_scatter_bytes(shard.nbytes, self.size)
        used = _Use((whole,), (shard,), whole)
        far = self._far_of_slices(scatter_steps_of, whole, shard.nbytes)
        return self._issue("reduce_scatter", name, used, sent, far, async_op=async_op)

    def all_gather_product(
        self, x_nI: torch.Tensor, weight_IO: torch.Tensor, *, name: str, keeps: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Write down a gather, and multiply what it gave; the fused operator has both, too."""
        self._borrow(x_nI.nbytes)
        whole_NI = x_nI.new_empty((x_nI.shape[0] * self.size, x_nI.shape[1]))
        self.all_gather(whole_NI, x_nI, name=name)
        y_NO = whole_NI @ weight_IO
        return y_NO, whole_NI if keeps else None

    def product_reduce_scatter(
        self, x_NI: torch.Tensor, weight_IO: torch.Tensor, *, name: str
    ) -> torch.Tensor:
        """Multiply, and write down that the parts of all ranks are summed."""
        y_NO = x_NI @ weight_IO
        y_nO = y_NO.new_empty((y_NO.shape[0] // self.size, y_NO.shape[1]))
        self._borrow(2 * y_nO.nbytes)
        self.reduce_scatter(y_nO, y_NO, name=name)
        return y_nO

    def _borrow(self, num_bytes: int) -> None:
        """Keep the largest memory that a fused operator has needed where others read from it."""
        if self._workspace is None or self._workspace.nbytes < num_bytes:
            with self._shapes.memory.within(BUFFERS):
                self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        """Write down an exchange of equal parts."""
        num_bytes = all_to_all_bytes(sent.nbytes, self.size)
        used = _Use((sent,), (received,), sent)
        far = self._far_of_pieces(sent.nbytes // self.size)
        return self._issue("all_to_all", name, used, num_bytes, far, async_op=async_op)

    def exchange(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], *, name: str
    ) -> Pending:
        """Write down an exchange of tensors of any sizes."""
        num_bytes = sum(tensor.nbytes for tensor in sends.values())
        used = _Use(tuple(sends.values()), tuple(receives.values()), None, (sends, receives))
        far = self._far_of_exchange(sends)
        return self._issue("exchange", name, used, num_bytes, far, async_op=True)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return what this rank gave, once for every member."""
        log, task = self._logged.log, self.recorder.task
        number = log.issue(
            Issue(
                communicator=self._logged.name,
                members=self.ranks,
                kind="gather_objects",
                num_bytes=0,
                dtype=NOT_COUNTED,
                name="objects",
                task=task,
            )
        )
        log.wait(number)
        log.host_read("gather_objects", task)
        return [value] * self.size

    def send(self, tensor: torch.Tensor, index: int, *, name: str, tag: int) -> Pending:
        """Write down a message to member `index`."""
        far, now = self._far_of_exchange({index: tensor}), self.recorder.now()
        record = self._event(SEND, name, tensor.nbytes, now, far, microbatch=tag)
        return self._message(SEND, tensor, index, name, record)

    def receive(self, tensor: torch.Tensor, index: int, *, name: str, tag: int) -> Pending:
        """Write down a message from member `index`."""
        del tag
        return self._message(RECEIVE, tensor, index, name)

    def _begin(
        self,
        issue: Issue,
        used: _Use,
        record: Callable[[WaitTime | None], None] | None,
        stream: str,
    ) -> Pending:
        """Write an operation down, and its use of memory on its stream, after the kernels."""
        number, order = self._logged.log.issue(issue), self._shapes.order
        self._shapes.flight.begin(number, issue.name, used.reads, used.writes)
        if order.follows:
            order.give(stream, order.moment(COMPUTE))
            work = StreamWork(by=issue.name, axis=self.axis, at=where_in_package())
            for tensors, fills in ((used.reads, False), (used.writes, True)):
                for tensor in tensors:
                    order.uses(stream, tensor, work, writes=fills)
        return _Logged(self._shapes, number, record, stream=stream)

    def _check_slice(self, full: torch.Tensor, shard: torch.Tensor, name: str) -> None:
        self._shapes.data.is_slice(full, shard, name, self.index * shard.numel())

    def _parts(self, used: _Use, name: str) -> Iterator[ExchangePart]:
        """Yield the parts of an exchange with other members."""
        own = self.ranks[self.index]
        for is_sent, tensors in zip((True, False), used.parts, strict=True):
            for place, tensor in tensors.items():
                data = self._shapes.data.named(tensor, name, where_in_package())
                ends = (own, self.ranks[place]) if is_sent else (self.ranks[place], own)
                yield ExchangePart(
                    sender=ends[0],
                    receiver=ends[1],
                    is_sent=is_sent,
                    num_bytes=tensor.nbytes,
                    data="" if data is None else data.text,
                    offset=0 if data is None else data.offset,
                )

    def _message(
        self,
        kind: str,
        tensor: torch.Tensor,
        index: int,
        name: str,
        record: Callable[[WaitTime | None], None] | None = None,
    ) -> Pending:
        require_contiguous(name, tensor)
        ends = sorted((self.ranks[index], self.ranks[self.index]))
        message = name.removesuffix(f" from rank {self.ranks[index]}")
        if kind == SEND:
            self._shapes.data.named(tensor, message, where_in_package())
        else:
            self._shapes.data.is_message(tensor, message)
        issue = Issue(
            communicator=self._logged.name,
            members=(ends[0], ends[1]),
            kind=kind,
            num_bytes=tensor.nbytes,
            dtype=_dtype(tensor),
            name=name,
            task=self.recorder.task,
            data=message,
            sent_bytes=tensor.nbytes if kind == SEND else 0,
        )
        used = _Use((tensor,), (), None) if kind == SEND else _Use((), (tensor,), None)
        # The messages of a pair have a separate stream.
        return self._begin(issue, used, record, f"{self._logged.name} with {self.ranks[index]}")

    def _issue(
        self, kind: str, name: str, used: _Use, sent: int, far: int, *, async_op: bool
    ) -> Pending:
        """Write down an operation on what it uses; `far` of the `sent` bytes leave the node."""
        require_contiguous(name, *used.reads, *used.writes)
        whole, data = used.whole, None
        if whole is not None:
            data = self._shapes.data.named(whole, name, where_in_package())
        issue = Issue(
            communicator=self._logged.name,
            members=self.ranks,
            kind=kind,
            num_bytes=0 if whole is None else whole.nbytes,
            dtype=NOT_COUNTED if whole is None else _dtype(whole),
            name=name,
            task=self.recorder.task,
            data="" if data is None else data.text,
            offset=0 if data is None else data.offset,
            parts=tuple(self._parts(used, name)),
            sent_bytes=sent,
        )
        event_kind = "all_to_all" if kind == "exchange" else kind
        record = self._event(event_kind, name, sent, self.recorder.now(), far)
        pending = self._begin(issue, used, record, self._logged.name)
        if not async_op:
            pending.wait()
        return pending


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class RehearsedCompletion(Completion):
    """Make groups that write down what they are asked for."""

    def __init__(self, shapes: ShapesOnly) -> None:
        """Write into the log of `shapes`."""
        self._shapes = shapes

    def communicator(self, name: str, ranks: tuple[int, ...], rank: int) -> Communicator | None:
        """Return the communicator of the ranks; None for a rank that is no member."""
        self._shapes.log.made(name, ranks)
        return RehearsedCommunicator(name, ranks, self._shapes.log) if rank in ranks else None

    def group(
        self,
        axis: str,
        ranks: Sequence[int],
        communicator: Communicator | None,
        recorder: Recorder,
    ) -> Group:
        """Return a group that sends nothing: of one that is alone nothing is written down."""
        if communicator is None:
            return Group(axis, ranks, recorder.rank, None, recorder)
        assert isinstance(communicator, RehearsedCommunicator)
        return RehearsedGroup(axis, ranks, communicator, recorder, self._shapes)

    def buffer_pool(self, device: torch.device) -> BufferPool | None:
        """Return what tells when memory is lent, as the allocator of a GPU lends it."""
        return MeteredPool(device, self._shapes.memory, self._shapes.flight.released)

    def offload_store(self, place: OffloadPlace, device: torch.device) -> OffloadStore:
        """Return a place that holds shapes only; what is on the host or in files has none here.

        A set that is fetched takes its buffer on the device, as where there is one.
        """
        if place.target == "none":
            return MemoryOffloadStore("device", partial(_shape, device))
        shapes = self._shapes
        return RehearsedOffloadStore(
            device, shapes.memory, shapes.order, num_buffers=place.num_buffers
        )

    def copy_streams(self, device: torch.device) -> CopyStreams:
        """Streams of activations, which move nothing."""
        return RehearsedCopyStreams(self._shapes.order, "activations")


def _shape(device: torch.device, num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
