# SPDX-License-Identifier: Apache-2.0
"""Every collective and message of a run: typed, recorded, and checked at the boundary.

Nothing else in Echelon (but its parts, `messages.py` and `symmetric_memory.py`) calls
`torch.distributed`. A `Group` is this rank's group over one axis; each call records an Event with
the bytes that the rank sends (`cost/bytes/terms.py`). Asynchrony is `Pending.wait()`; there are no
hand-made streams. A tensor must be contiguous: Gloo reduces the raw memory of a strided view in
silence.

Over Gloo, all-gather and reduce-scatter are direct exchanges (`messages.py`): the bytes of the
formula, no idle link, and the same result bit for bit on every run. A group that has an algorithm
of its own (`sum_by`) makes them, and its sums, of the steps of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from echelon.core.choices.collective_algorithms import BACKEND
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.cost.bytes.all_reduce import SumGroup
from echelon.cost.bytes.terms import (
    all_gather_bytes,
    all_reduce_bytes,
    all_to_all_bytes,
    reduce_scatter_bytes,
)
from echelon.parallel.tensor_memory import BufferPool
from echelon.parallel.transport.algorithms import (
    BackgroundThread,
    BackgroundWork,
    Step,
    gather_steps_of,
    run_scatter,
    run_steps,
    scatter_steps_of,
    steps_of,
)
from echelon.parallel.transport.messages import (
    GlooPeers,
    PendingWorks,
    add_in_order,
    start_all_gather,
    start_gloo_exchange,
    start_nccl_exchange,
    start_reduce_scatter,
)
from echelon.parallel.transport.recorder import BegunCall, Recorder, WaitTime
from echelon.parallel.transport.shared_room import SharedRoom, SharedWork, open_room
from echelon.parallel.transport.symmetric_memory import (
    fused_all_gather_product,
    fused_product_reduce_scatter,
)

ReduceOp = Literal["sum", "max"]

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective under way; `wait` ends it, finishes its result, and records its event."""

    __slots__ = ("_finish", "_issued", "_name", "_number", "_recorder", "_work")

    def __init__(
        self,
        work: dist.Work | PendingWorks | BackgroundWork | SharedWork | None = None,
        finish: Callable[[WaitTime], None] | None = None,
        *,
        name: str = "",
        recorder: Recorder | None = None,
        number: int = 0,
    ) -> None:
        """Hold the handle of torch, what to do when it is done, told how long that took, and the
        number of its fingerprint."""
        self._work, self._finish, self._name, self._recorder = work, finish, name, recorder
        self._issued, self._number = None, number
        if work is not None and recorder is not None:
            self._issued = recorder.issued(name, work, number)

    def done(self) -> bool:
        """Return whether `wait` is known to return at once.

        Gloo tells so of its own collectives only. Of messages, and so of all that is a direct
        exchange (all-gather, reduce-scatter), it knows nothing before they are waited for: False.
        """
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Return when the result is there; a second call returns at once."""
        work, finish = self._work, self._finish
        self._work = self._finish = None
        waited = WaitTime()
        if work is not None and self._recorder is not None:
            with self._recorder.waiting(self._name, self._number) as waited:
                self._recorder.wait_for(work, self._number)
            self._recorder.awaited(self._issued)
        if finish is not None:
            finish(waited)


class Group:
    """The ranks that this rank talks to over one axis (or over several axes at once)."""

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        rank: int,
        communicator: Communicator | None,
        recorder: Recorder,
    ) -> None:
        """Hold the group of `ranks` (global, in order) that `rank` belongs to.

        One that is alone has no communicator.
        """
        self.axis, self.ranks, self.recorder = axis, tuple(ranks), recorder
        self.size, self.index = len(self.ranks), self.ranks.index(rank)
        node = recorder.devices_per_node or max(self.ranks) + 1
        self._elsewhere = frozenset(
            place for place, other in enumerate(self.ranks) if other // node != rank // node
        )
        self.communicator = communicator
        self._group = None if communicator is None else communicator.process_group
        self._buffer_pool = BufferPool(torch.device("cpu"))
        self._sums: SumGroup | None = None
        self._slices: SumGroup | None = None
        self._room: SharedRoom | None = None
        self._asked_for_room = False

    def share_memory(self, pieces: PieceSizes = TRAINING_PIECES) -> bool:
        """Exchange small tensors through memory from now on, where all members are on one host.

        All members call it together; return whether it is so. Only Gloo's groups have use for it.
        """
        if not self._asked_for_room:
            self._asked_for_room = True
            if self.communicator is not None and self.communicator.is_gloo:
                self._room = open_room(
                    self.size, self.index, self.gather_objects, pieces.shared_bytes
                )
        return self._room is not None

    def sum_by(self, sums: SumGroup, *, slices: bool = True) -> None:
        """Sum by the algorithm that `sums` names from now on; all members call it alike.

        So are `slices` scattered and gathered, by an algorithm that does that. A group that gathers
        a few numbers alone leaves them to direct exchanges, which take one hop.
        """
        self._sums = sums
        self._slices = sums if slices and sums.scatters else None

    def _sum_bytes(self, tensor: torch.Tensor) -> int:
        """Return the bytes that this member sends to sum `tensor`."""
        if self._sums is None:
            return all_reduce_bytes(tensor.nbytes, self.size)
        return self._sums.bytes(tensor.numel(), tensor.element_size())

    def _far_of_pieces(self, piece: int) -> int:
        """Bytes to other nodes if each other member gets `piece` bytes."""
        return len(self._elsewhere) * piece

    def _far_of_exchange(self, sends: Mapping[int, torch.Tensor]) -> int:
        """Bytes to other nodes of tensors by the place of their receiver."""
        return sum(tensor.nbytes for place, tensor in sends.items() if place in self._elsewhere)

    def _far_of_sum(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> int:
        """Bytes of an all-reduce to other nodes; the backend has a ring of members in order."""
        if not self._elsewhere:
            return 0
        sums = self._sums
        if op == "max" or sums is None or sums.algorithm == BACKEND:
            leaves = (self.index + 1) % self.size in self._elsewhere
            return leaves * all_reduce_bytes(tensor.nbytes, self.size)
        return self._far_of_steps(steps_of(sums, tensor.numel()), tensor)

    def _far_of_slices(
        self, make: Callable[[SumGroup, int], tuple[Step, ...]], full: torch.Tensor, piece: int
    ) -> int:
        """Bytes to other nodes if slices of `full`, `piece` bytes each, are sent."""
        if self._slices is None or not self._elsewhere:
            return self._far_of_pieces(piece)
        return self._far_of_steps(make(self._slices, full.numel()), full)

    def _far_of_steps(self, steps: Iterable[Step], tensor: torch.Tensor) -> int:
        sends = (send for step in steps for send in step.sends)
        elements = sum(part.length for place, part in sends if place in self._elsewhere)
        return elements * tensor.element_size()

    @property
    def receives_to_sum(self) -> bool:
        """Return whether a reduce-scatter holds the others' parts in memory until `wait`."""
        direct = self.communicator is not None and self.communicator.is_gloo
        return direct and self._slices is None

    def all_reduce(
        self, tensor: torch.Tensor, *, name: str, async_op: bool = False, op: ReduceOp = "sum"
    ) -> Pending:
        """Sum `tensor` over the group, or find the largest of each element, in place."""
        if self.size == 1:
            return Pending()
        require_contiguous(name, tensor)
        start, number = self.recorder.now(), self._begun("all_reduce", name, tensor)
        if op == "max":
            largest = dist.ReduceOp.MAX
            work = dist.all_reduce(tensor, op=largest, group=self._group, async_op=True)
            sent = all_reduce_bytes(tensor.nbytes, self.size)
        elif self._room is not None and self._room.has_room(tensor):
            # Told are the bytes of the messages that it stands for: they hang on no processor.
            work, sent = self._room.add(tensor), self._sum_bytes(tensor)
        else:
            work, sent = self._start_sum(tensor), self._sum_bytes(tensor)
        record = self._event("all_reduce", name, sent, start, self._far_of_sum(tensor, op))
        return self._pending(work, name, record, async_op, number)

    def all_gather(
        self, whole: torch.Tensor, shard: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        """Fill `whole` [n * piece, ...] with the pieces of all ranks, in group order."""
        if self.size == 1:
            whole.copy_(shard)
            return Pending()
        require_contiguous(name, whole, shard)
        start, number = self.recorder.now(), self._begun("all_gather", name, shard)
        sent = all_gather_bytes(shard.nbytes, self.size)
        far = self._far_of_slices(gather_steps_of, whole, shard.nbytes)
        record = self._event("all_gather", name, sent, start, far)
        if self._room is not None and self._room.has_room(shard):
            work = self._room.gather(whole, shard)
            return self._pending(work, name, record, async_op, number)
        peers = self._peers()
        if peers is None:
            work = _all_gather(whole, shard, group=self._group, async_op=True)
        elif self._slices is not None:
            whole.view(self.size, -1)[self.index].copy_(shard.view(-1))
            steps = gather_steps_of(self._slices, whole.numel())
            work = self._started(partial(run_steps, whole, steps, peers))
        else:
            work = start_all_gather(whole, shard, peers)
        return self._pending(work, name, record, async_op, number)

    def reduce_scatter(
        self, shard: torch.Tensor, whole: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        """Fill `shard` with this rank's part of the sum of `whole` over the group."""
        if self.size == 1:
            shard.copy_(whole)
            return Pending()
        require_contiguous(name, whole, shard)
        start, number = self.recorder.now(), self._begun("reduce_scatter", name, whole)
        sent = reduce_scatter_bytes(shard.nbytes, self.size)
        far = self._far_of_slices(scatter_steps_of, whole, shard.nbytes)
        record = self._event("reduce_scatter", name, sent, start, far)
        peers = self._peers()
        if peers is None:
            work = _reduce_scatter(shard, whole, group=self._group, async_op=True)
            return self._pending(work, name, record, async_op, number)
        if self._slices is not None:
            steps = scatter_steps_of(self._slices, whole.numel())
            work = self._started(partial(run_scatter, shard, whole, steps, peers))
            return self._pending(work, name, record, async_op, number)
        memory = self._buffer_pool.take((self.size - 1) * shard.nbytes)
        received = memory[: (self.size - 1) * shard.nbytes].view(whole.dtype)
        received = received.view(self.size - 1, *shard.shape)
        works = start_reduce_scatter(received, whole, peers)

        def add_up(waited: WaitTime) -> None:
            add_in_order(shard, received, whole, self.index)
            self._buffer_pool.give_back(memory)
            record(waited)

        return self._pending(works, name, add_up, async_op, number)

    def all_gather_product(
        self, x_nI: torch.Tensor, weight_IO: torch.Tensor, *, name: str, keeps: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the product of the rows of all members by one fused operator, and these rows.

        `keeps`: the rows are asked for, too.
        """
        require_contiguous(name, x_nI)
        assert self._group is not None, "there is another member"
        start, number = self.recorder.now(), self._begun("all_gather", name, x_nI)
        found = fused_all_gather_product(x_nI, weight_IO, self._group, keeps=keeps)
        self.recorder.over(number)
        sent = all_gather_bytes(x_nI.nbytes, self.size)
        self._event("all_gather", name, sent, start, self._far_of_pieces(x_nI.nbytes))(None)
        return found

    def product_reduce_scatter(
        self, x_NI: torch.Tensor, weight_IO: torch.Tensor, *, name: str
    ) -> torch.Tensor:
        """Return this member's rows of the sum of all products, by one fused operator."""
        require_contiguous(name, x_NI)
        assert self._group is not None, "there is another member"
        start, number = self.recorder.now(), self._begun("reduce_scatter", name, x_NI)
        y_nO = fused_product_reduce_scatter(x_NI, weight_IO, self._group)
        self.recorder.over(number)
        sent = reduce_scatter_bytes(y_nO.nbytes, self.size)
        self._event("reduce_scatter", name, sent, start, self._far_of_pieces(y_nO.nbytes))(None)
        return y_nO

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        """Send part i of `sent` (equal parts of its rows) to member i; its part is i of `received`.

        The exchange is its own transpose: backward is the same exchange of the gradient.
        """
        if self.size == 1:
            received.copy_(sent)
            return Pending()
        require_contiguous(name, received, sent)
        start, number = self.recorder.now(), self._begun("all_to_all", name, sent)
        work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)
        far = self._far_of_pieces(sent.nbytes // self.size)
        num_bytes = all_to_all_bytes(sent.nbytes, self.size)
        record = self._event("all_to_all", name, num_bytes, start, far)
        return self._pending(work, name, record, async_op, number)

    def exchange(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], *, name: str
    ) -> Pending:
        """Start to send and receive flat tensors of any sizes, by the place of the other member.

        Every member calls this, one that has nothing to send or receive too; what one sends another
        must receive. What is sent must not change until `wait`.
        """
        if self.size == 1:
            return Pending()
        require_contiguous(name, *sends.values(), *receives.values())
        start, number = self.recorder.now(), self._begun("exchange", name, None)
        peers = self._peers()
        if peers is None:
            work = start_nccl_exchange(sends, receives, self.ranks, self._group)
        else:
            work = start_gloo_exchange(sends, receives, peers)
        sent = sum(tensor.nbytes for tensor in sends.values())
        record = self._event("all_to_all", name, sent, start, self._far_of_exchange(sends))
        return self._pending(work, name, record, True, number)

    def gather_rows(self, row: torch.Tensor, *, name: str) -> torch.Tensor:
        """Return [n, len(row)]: the small vector of every rank, the same on all of them."""
        whole = row.new_empty((self.size, row.numel()))
        self.all_gather(whole.view(-1), row, name=name).wait()
        return whole

    def gather_objects(self, value: Any) -> list[Any]:
        """Return what every rank gave, in group order; for small things, outside of steps."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        number = self._begun("gather_objects", "objects", None)
        with self.recorder.waiting("gather_objects", number):
            dist.all_gather_object(values, value, group=self._group)
        self.recorder.over(number)
        return values

    def send(self, tensor: torch.Tensor, index: int, *, name: str, tag: int) -> Pending:
        """Send `tensor` to member `index` of the group; it must live until `wait`."""
        require_contiguous(name, tensor)
        ends = (self.recorder.rank, self.ranks[index])
        start, number = self.recorder.now(), self._begun("send", name, tensor, ends)
        work = dist.isend(tensor, self.ranks[index], group=self._group, tag=tag)
        far = self._far_of_exchange({index: tensor})
        record = self._event("send", name, tensor.nbytes, start, far, microbatch=tag)
        return self._pending(work, name, record, True, number)

    def receive(self, tensor: torch.Tensor, index: int, *, name: str, tag: int) -> Pending:
        """Receive into `tensor` from member `index` of the group."""
        require_contiguous(name, tensor)
        source = self.ranks[index]
        sent_as = name.removesuffix(f" from rank {source}")
        number = self._begun("receive", sent_as, tensor, (source, self.recorder.rank))
        work = dist.irecv(tensor, self.ranks[index], group=self._group, tag=tag)
        finish, recorder = self.recorder.received, self.recorder
        return Pending(work, finish, name=name, recorder=recorder, number=number)

    def _start_sum(self, tensor: torch.Tensor) -> dist.Work | BackgroundWork | None:
        sums = self._sums
        if sums is None or sums.algorithm == BACKEND or self.communicator is None:
            return dist.all_reduce(tensor, group=self._group, async_op=True)
        peers = self._peers()
        assert peers is not None, "a rule keeps algorithms made of messages to Gloo"
        steps = steps_of(sums, tensor.numel())
        return self._started(partial(run_steps, tensor, steps, peers))

    def _started(self, task: Callable[[], None]) -> BackgroundWork:
        """Give the thread of the communicator a task."""
        assert self.communicator is not None, "there is another member"
        return self.communicator.thread.start(task)

    def _peers(self) -> GlooPeers | None:
        """Return the members of this group for the next direct exchange; None where not Gloo."""
        communicator = self.communicator
        if communicator is None or not communicator.is_gloo:
            return None
        number = communicator.next_exchange()
        return GlooPeers(communicator.process_group, self.ranks, self.index, number)

    def _begun(
        self,
        kind: str,
        name: str,
        tensor: torch.Tensor | None,
        ends: tuple[int, int] | None = None,
    ) -> int:
        """Leave the fingerprint of an operation, and return its number (`Recorder.begun`)."""
        return self.recorder.begun(self.communicator, self.axis, kind, name, tensor, ends)

    def _event(
        self,
        kind: str,
        name: str,
        sent: int,
        start: float,
        far: int,
        microbatch: int | None = None,
    ) -> Callable[[WaitTime | None], None]:
        """Callback that records a call begun at `start`, once it has ended.

        It sends `sent` bytes, `far` of them to ranks on other nodes.
        """
        call = BegunCall(kind, name, start, self.axis, sent, microbatch, far)
        return partial(self.recorder.ended, call)

    def _pending(
        self,
        work: dist.Work | PendingWorks | BackgroundWork | SharedWork | None,
        name: str,
        finish: Callable[[WaitTime], None],
        async_op: bool,
        number: int,
    ) -> Pending:
        pending = Pending(work, finish, name=name, recorder=self.recorder, number=number)
        if not async_op:
            pending.wait()
        return pending


def require_contiguous(name: str, *tensors: torch.Tensor) -> None:
    """Refuse a tensor that would have to be copied to be sent: a bug of the caller."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: a strided tensor cannot be sent without a copy")


class Communicator:
    """Hold the process group of some ranks, of which this is one.

    Groups of the same ranks that call in the same order share one: NCCL keeps buffers for each, and
    runs the calls of one in the order in which they come. So the exchanges of all of them are
    numbered here.
    """

    def __init__(
        self, ranks: Sequence[int], process_group: dist.ProcessGroup, name: str = ""
    ) -> None:
        """Hold the process group of `ranks`, global and in order; every member has one `name`."""
        self.ranks, self.process_group, self.name = tuple(ranks), process_group, name
        self.is_gloo = dist.get_backend(process_group) == "gloo"
        self.thread = BackgroundThread()
        self._exchanges = 0
        self.called = ""
        """What fingerprints call it, from its first operation on."""
        self.sequences: dict[tuple[int, int] | None, int] = {}
        """How many collectives were begun, and how many messages each way, for fingerprints."""

    def next_exchange(self) -> int:
        """Return the number of an exchange that begins, the same on every member."""
        self._exchanges += 1
        return self._exchanges

    def open(self, recorder: Recorder, axis: str) -> None:
        """Join the members before the first call that counts; all of them call it together.

        NCCL joins them inside of the first call, and holds the host until all have come: one that
        is still busy elsewhere, and waits there for one of these, would never come.
        """
        if not self.is_gloo:
            token, name = torch.zeros(1, device=self._device()), f"the other ranks of {axis}"
            number = recorder.begun(self, axis, "all_reduce", name, token)
            with recorder.waiting(name, number):
                dist.all_reduce(token, group=self.process_group)
            recorder.over(number)

    def open_links(self, pairs: Iterable[tuple[int, int]], recorder: Recorder) -> None:
        """Open the links between pairs of members, in this order; all members call it together.

        NCCL opens a link inside of the first message over it, where either end waits for the
        other. In a pipeline the first message of one rank may be on another link than that of its
        peer, and both would wait for ever; so links are opened here, one after the other.
        """
        token = torch.zeros(1, device=self._device())
        index = self.ranks.index(recorder.rank)
        with recorder.waiting("the other ranks of the pipeline"):
            for first, second in pairs:
                if index == first:
                    dist.send(token, self.ranks[second], group=self.process_group)
                elif index == second:
                    dist.recv(token, self.ranks[first], group=self.process_group)

    def _device(self) -> torch.device:
        if self.is_gloo:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())
