"""Groups that send nothing write down what they are asked for, and what is in flight."""

from __future__ import annotations

import pytest
import torch

from echelon.core.event import EventList
from echelon.cost.bytes.terms import all_gather_bytes, all_reduce_bytes
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.recorder import Recorder
from echelon.rehearsal.groups import RehearsedCompletion
from echelon.rehearsal.memory import MISSING_WAIT
from echelon.rehearsal.order import RECEIVE, SEND, HostRead, Issue, Made, RankLog, Wait
from echelon.rehearsal.shapes import META, ShapesOnly


class Rank:
    """Rank 1 of a group of four."""

    def __init__(self) -> None:
        self.log, self.events = RankLog(1), EventList()
        self.shapes = ShapesOnly(self.log)
        completion = RehearsedCompletion(self.shapes)
        self.communicator = completion.communicator("tp.1", (0, 1, 2, 3), 1)
        recorder = Recorder(1, self.events)
        self.recorder = recorder
        self.group: Group = completion.group("tp", (0, 1, 2, 3), self.communicator, recorder)
        self.alone: Group = completion.group("cp", (1,), None, recorder)

    def issues(self) -> list[Issue]:
        return [one for one in self.log.entries if isinstance(one, Issue)]


def shape(*size: int) -> torch.Tensor:
    return torch.empty(size, device=META)


def test_a_rank_that_is_no_member_has_no_communicator() -> None:
    completion = RehearsedCompletion(ShapesOnly(RankLog(5)))
    assert completion.communicator("tp.1", (0, 1, 2, 3), 5) is None


def test_calls_waits_and_bytes_are_written_down() -> None:
    rank = Rank()
    with rank.shapes:
        rank.group.all_reduce(shape(8), name="sum")
        pending = rank.group.all_gather(shape(8), shape(2), name="whole", async_op=True)
    assert not pending.done()
    assert [type(entry) for entry in rank.log.entries] == [Made, Issue, Wait, Issue]
    first, second = rank.issues()
    assert (first.kind, first.num_bytes, first.dtype, first.members) == (
        "all_reduce",
        32,
        "float32",
        (0, 1, 2, 3),
    )
    assert (second.kind, second.num_bytes, second.name) == ("all_gather", 32, "whole")
    pending.wait()
    pending.wait()
    assert [type(entry) for entry in rank.log.entries] == [Made, Issue, Wait, Issue, Wait]
    assert rank.events.bytes_by_axis() == {"tp": all_reduce_bytes(32, 4) + all_gather_bytes(8, 4)}


def test_what_is_under_way_is_watched_until_the_wait() -> None:
    rank = Rank()
    with rank.shapes:
        whole = shape(8)
        pending = rank.group.reduce_scatter(shape(2), whole, name="slice", async_op=True)
        whole.zero_()
        pending.wait()
        whole.zero_()
    assert [one.rule for one in rank.shapes.flight.misuses] == [MISSING_WAIT]


def test_fused_products_are_a_gather_or_a_sum_and_a_product() -> None:
    rank = Rank()
    with rank.shapes:
        weight = shape(6, 5)
        product, whole = rank.group.all_gather_product(shape(2, 6), weight, name="in", keeps=True)
        assert whole is not None
        assert (tuple(product.shape), tuple(whole.shape)) == ((8, 5), (8, 6))
        assert rank.group.all_gather_product(shape(2, 6), weight, name="in", keeps=False)[1] is None
        summed = rank.group.product_reduce_scatter(shape(8, 6), weight, name="out")
        assert tuple(summed.shape) == (2, 5)
    assert [(one.kind, one.num_bytes) for one in rank.issues()] == [
        ("all_gather", 8 * 6 * 4),
        ("all_gather", 8 * 6 * 4),
        ("reduce_scatter", 8 * 5 * 4),
    ]
    # Others read chunks out of memory that stays: two of the sum are more than one of the rows.
    assert rank.shapes.memory.most["buffers"] == 2 * (2 * 5 * 4) + 2 * 6 * 4


def test_messages_name_both_ends() -> None:
    rank = Rank()
    with rank.shapes:
        rank.group.send(shape(3), 3, name="there", tag=0).wait()
        rank.group.receive(shape(3), 0, name="here", tag=0).wait()
    sent, received = rank.issues()
    assert (sent.kind, sent.members, sent.opens) == (SEND, (1, 3), True)
    assert (received.kind, received.members, received.opens) == (RECEIVE, (0, 1), True)


def test_links_are_opened_by_their_ends_only() -> None:
    rank = Rank()
    assert rank.communicator is not None
    rank.communicator.open_links([(0, 1), (2, 3), (1, 2)], rank.recorder)
    assert [(one.kind, one.members) for one in rank.issues()] == [
        (RECEIVE, (0, 1)),
        (SEND, (1, 2)),
    ]


def test_objects_are_gathered_by_the_host() -> None:
    rank = Rank()
    assert rank.group.gather_objects("mine") == ["mine"] * 4
    assert isinstance(rank.log.entries[-1], HostRead)
    assert rank.alone.gather_objects("mine") == ["mine"]


def test_one_rank_alone_calls_nothing() -> None:
    rank = Rank()
    with rank.shapes:
        x = shape(4)
        rank.alone.all_reduce(x, name="sum").wait()
        rank.alone.all_gather(shape(4), x, name="whole").wait()
        rank.alone.reduce_scatter(shape(4), x, name="slice").wait()
        rank.alone.all_to_all(shape(4), x, name="parts").wait()
        rank.alone.exchange({}, {}, name="rows").wait()
    assert [type(entry) for entry in rank.log.entries] == [Made]


def test_what_would_have_to_be_copied_to_be_sent_is_refused() -> None:
    rank = Rank()
    with rank.shapes, pytest.raises(ValueError, match="without a copy"):
        rank.group.all_reduce(shape(4, 2).t(), name="sum")
