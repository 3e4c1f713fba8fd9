"""What a rank of the engine records on Gloo, to lay beside what its rehearsal records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from echelon.core.event import Event
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.completion.completion import Completion
from echelon.parallel.transport.collectives import Communicator, Group, Pending
from echelon.parallel.transport.recorder import Recorder
from echelon.proof.oracle.batches import global_batch
from echelon.rehearsal.order import Issue
from echelon.rehearsal.rank import RankRehearsal
from echelon.training.subject import EngineSubject

Call = tuple[str, str, str, int]
"""What an event says but for its times, and for where it was awaited: kind, name, axis, bytes."""


def call_of(event: Event) -> Call:
    return event.kind, event.name, event.axis, event.bytes


def recorded_calls(context: RankContext, argument: Mapping[str, Any]) -> list[Call]:
    """Take two steps of a plan on a rank; return the calls of the second one."""
    plan = Plan.from_json(argument["plan"])
    subject = EngineSubject(plan, context)
    for step in range(2):
        subject.step(global_batch(plan, step), step)
    return [call_of(event) for event in subject.events.events]


Issued = tuple[str, list[int], str, int, str, str]
"""An operation that a communicator was given: its name, its members, the kind, the bytes that must
be equal on all, their dtype, and what it is for."""


class _IssuingGroup(Group):
    """A group of the transport that also writes down what it is given, in that order."""

    def __init__(self, group: Group, name: str, issued: list[Issued], recorder: Recorder) -> None:
        super().__init__(group.axis, group.ranks, recorder.rank, group.communicator, recorder)
        self._name, self._issued = name, issued

    def _tell(self, kind: str, name: str, whole: torch.Tensor | None, ranks: Any = None) -> None:
        if self.communicator is not None:
            size, dtype = (0, "") if whole is None else (whole.nbytes, str(whole.dtype)[6:])
            members = sorted(ranks) if ranks else list(self.ranks)
            self._issued.append((self._name, members, kind, size, dtype, name))

    def all_reduce(self, tensor: torch.Tensor, *, name: str, async_op: bool = False) -> Pending:
        self._tell("all_reduce", name, tensor)
        return super().all_reduce(tensor, name=name, async_op=async_op)

    def all_gather(
        self, whole: torch.Tensor, shard: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        self._tell("all_gather", name, whole)
        return super().all_gather(whole, shard, name=name, async_op=async_op)

    def reduce_scatter(
        self, shard: torch.Tensor, whole: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        self._tell("reduce_scatter", name, whole)
        return super().reduce_scatter(shard, whole, name=name, async_op=async_op)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, *, name: str, async_op: bool = False
    ) -> Pending:
        self._tell("all_to_all", name, sent)
        return super().all_to_all(received, sent, name=name, async_op=async_op)

    def exchange(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], *, name: str
    ) -> Pending:
        self._tell("exchange", name, None)
        return super().exchange(sends, receives, name=name)

    def gather_objects(self, value: Any) -> list[Any]:
        self._tell("gather_objects", "objects", None)
        return super().gather_objects(value)

    def send(self, tensor: torch.Tensor, index: int, *, name: str, tag: int) -> Pending:
        self._tell("send", name, tensor, (self.ranks[index], self.ranks[self.index]))
        return super().send(tensor, index, name=name, tag=tag)

    def receive(self, tensor: torch.Tensor, index: int, *, name: str, tag: int) -> Pending:
        self._tell("receive", name, tensor, (self.ranks[index], self.ranks[self.index]))
        return super().receive(tensor, index, name=name, tag=tag)


class _Issuing(Completion):
    """Make the groups of the transport, and write down what each is given."""

    def __init__(self) -> None:
        self.issued: list[Issued] = []
        self._names: dict[int, str] = {}

    def communicator(self, name: str, ranks: tuple[int, ...], rank: int) -> Communicator | None:
        made = super().communicator(name, ranks, rank)
        if made is not None:
            self._names[id(made)] = name
        return made

    def group(
        self,
        axis: str,
        ranks: Sequence[int],
        communicator: Communicator | None,
        recorder: Recorder,
    ) -> Group:
        made = super().group(axis, ranks, communicator, recorder)
        name = "" if communicator is None else self._names[id(communicator)]
        return _IssuingGroup(made, name, self.issued, recorder)


def issued_on_gloo(context: RankContext, argument: Mapping[str, Any]) -> list[Issued]:
    """Build a rank of a plan and take two steps; return what its communicators were given."""
    plan, completion = Plan.from_json(argument["plan"]), _Issuing()
    subject = EngineSubject(plan, context, completion, tells_activations=False)
    for step in range(2):
        subject.step(global_batch(plan, step), step)
    return completion.issued


def issued_in_rehearsal(found: RankRehearsal) -> list[Issued]:
    """Return the same of a rehearsal; what opens communicators is the transport's own there."""
    return [
        (one.communicator, list(one.members), one.kind, one.num_bytes, one.dtype, one.name)
        for one in found.entries
        if isinstance(one, Issue) and not one.opens
    ]
