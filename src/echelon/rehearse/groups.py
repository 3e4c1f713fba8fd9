"""Groups that write down what they are asked for, and send nothing.

What comes from other ranks has the right shape and no elements, so tensors must be on the meta
device. Small objects come back as if every rank had given the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from echelon.cost.bytes.terms import (
    all_gather_bytes,
    all_reduce_bytes,
    all_to_all_bytes,
    reduce_scatter_bytes,
)
from echelon.parallel.completion.completion import Completion
from echelon.parallel.tensor_memory import BufferPool
from echelon.parallel.transport.collectives import Group, Pending, require_contiguous
from echelon.parallel.transport.communicator import Communicator
from echelon.parallel.transport.recorder import Recorder
from echelon.rehearse.log import RECEIVE, SEND, Issue, RankLog

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
    """An operation that was written down; so is the wait for it."""

    __slots__ = ("_issue", "_log")

    def __init__(self, log: RankLog, issue: int) -> None:
        super().__init__()
        self._log, self._issue = log, issue

    def done(self) -> bool:
        """Return False: on a GPU nobody knows before the wait."""
        return False

    def wait(self) -> None:
        """Write the wait down; a second one is none."""
        if self._issue >= 0:
            self._log.wait(self._issue)
        self._issue = -1


class RehearsedGroup(Group):
    """A group whose operations are written into the log of its rank."""

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        communicator: RehearsedCommunicator | None,
        recorder: Recorder,
    ) -> None:
        """Hold the group of `ranks` that the recorder's rank belongs to."""
        super().__init__(axis, ranks, recorder.rank, None, recorder)
        self.communicator = self._logged = communicator

    def all_reduce(self, tensor: torch.Tensor, *, name: str, async_op: bool = False) -> Pending:
        """Write down a sum of `tensor`."""
        if self._logged is None:
            return super().all_reduce(tensor, name=name, async_op=async_op)
        sent = all_reduce_bytes(tensor.nbytes, self.size)
        return self._issue("all_reduce", name, tensor, sent, async_op, tensor)

    def all_gather(
        self, whole: torch.Tensor, shard: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        """Write down that `whole` is filled with the pieces of all ranks."""
        if self._logged is None:
            return super().all_gather(whole, shard, name=name, async_op=async_op)
        sent = all_gather_bytes(shard.nbytes, self.size)
        return self._issue("all_gather", name, whole, sent, async_op, whole, shard)

    def reduce_scatter(
        self, shard: torch.Tensor, whole: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        """Write down that `shard` is filled with a part of a sum."""
        if self._logged is None:
            return super().reduce_scatter(shard, whole, name=name, async_op=async_op)
        sent = reduce_scatter_bytes(shard.nbytes, self.size)
        return self._issue("reduce_scatter", name, whole, sent, async_op, whole, shard)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        """Write down an exchange of equal parts."""
        if self._logged is None:
            return super().all_to_all(received, sent, name=name, async_op=async_op)
        num_bytes = all_to_all_bytes(sent.nbytes, self.size)
        return self._issue("all_to_all", name, sent, num_bytes, async_op, received, sent)

    def exchange(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], *, name: str
    ) -> Pending:
        """Write down an exchange of tensors of any sizes."""
        if self._logged is None:
            return super().exchange(sends, receives, name=name)
        tensors = (*sends.values(), *receives.values())
        num_bytes = sum(tensor.nbytes for tensor in sends.values())
        return self._issue("exchange", name, None, num_bytes, True, *tensors)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return what this rank gave, once for every member."""
        if self._logged is not None:
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
        pending = self._message(SEND, tensor, index, name)
        self._event(SEND, name, tensor.nbytes, self.recorder.now(), microbatch=tag)()
        return pending

    def receive(self, tensor: torch.Tensor, index: int, *, name: str, tag: int) -> Pending:
        """Write down a message from member `index`."""
        del tag
        return self._message(RECEIVE, tensor, index, name)

    def _message(self, kind: str, tensor: torch.Tensor, index: int, name: str) -> Pending:
        require_contiguous(name, tensor)
        assert self._logged is not None, "there is another member"
        ends = sorted((self.ranks[index], self.ranks[self.index]))
        log = self._logged.log
        number = log.issue(
            Issue(
                communicator=self._logged.name,
                members=(ends[0], ends[1]),
                kind=kind,
                num_bytes=tensor.nbytes,
                dtype=_dtype(tensor),
                name=name,
                task=self.recorder.task,
            )
        )
        return _Logged(log, number)

    def _issue(
        self,
        kind: str,
        name: str,
        whole: torch.Tensor | None,
        sent: int,
        async_op: bool,
        *tensors: torch.Tensor,
    ) -> Pending:
        """Write down an operation; members compare the bytes and the dtype of `whole`."""
        assert self._logged is not None, "there is another member"
        require_contiguous(name, *tensors)
        log = self._logged.log
        number = log.issue(
            Issue(
                communicator=self._logged.name,
                members=self.ranks,
                kind=kind,
                num_bytes=0 if whole is None else whole.nbytes,
                dtype=NOT_COUNTED if whole is None else _dtype(whole),
                name=name,
                task=self.recorder.task,
            )
        )
        self._event("all_to_all" if kind == "exchange" else kind, name, sent, self.recorder.now())()
        pending = _Logged(log, number)
        if not async_op:
            pending.wait()
        return pending


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class RehearsedCompletion(Completion):
    """Make groups that write down what they are asked for."""

    def __init__(self, log: RankLog) -> None:
        """Write into `log`."""
        self.log = log

    def communicator(self, name: str, ranks: tuple[int, ...], rank: int) -> Communicator | None:
        """Return what stands for the ranks; None to a rank that is no member."""
        return RehearsedCommunicator(name, ranks, self.log) if rank in ranks else None

    def group(
        self,
        axis: str,
        ranks: Sequence[int],
        communicator: Communicator | None,
        recorder: Recorder,
    ) -> Group:
        """Return a group that sends nothing."""
        assert communicator is None or isinstance(communicator, RehearsedCommunicator)
        return RehearsedGroup(axis, ranks, communicator, recorder)

    def buffer_pool(self, device: torch.device) -> BufferPool | None:
        """Return None: the allocator of a GPU keeps such memory itself."""
        return None
