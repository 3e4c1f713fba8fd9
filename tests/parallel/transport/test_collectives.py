"""Every collective gives the right values, refuses strided tensors, and records its bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.event import EventList
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.transport.collectives import Group, Pending
from echelon.parallel.transport.recorder import Recorder
from tests.parallel import targets


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest, rank_pool: RankPool) -> list[dict[str, Any]]:
    """Run every collective on two, three and four ranks."""
    return rank_pool.run(targets.every_collective, None, world_size=request.param)


def test_all_reduce_sums_in_place(ranks: list[dict[str, Any]]) -> None:
    total = torch.stack([rank["whole"] for rank in ranks]).sum(0)
    assert all(torch.equal(rank["summed"], total) for rank in ranks)


def test_all_gather_keeps_group_order(ranks: list[dict[str, Any]]) -> None:
    expected = torch.cat([rank["whole"][:2] for rank in ranks])
    assert all(torch.equal(rank["gathered"], expected) for rank in ranks)


def test_reduce_scatter_gives_each_rank_its_rows_of_the_sum(ranks: list[dict[str, Any]]) -> None:
    total = torch.stack([rank["whole"] for rank in ranks]).sum(0)
    for index, rank in enumerate(ranks):
        assert torch.equal(rank["piece"], total[2 * index : 2 * index + 2])
        assert torch.equal(rank["kept"], rank["whole"])


def test_all_to_all_transposes_ranks_and_parts(ranks: list[dict[str, Any]]) -> None:
    for index, rank in enumerate(ranks):
        parts = [other["whole"][2 * index : 2 * index + 2] for other in ranks]
        assert torch.equal(rank["exchanged"], torch.cat(parts))
    # It is its own transpose: <A x, g> = <x, A g> over all ranks.
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(r["whole"].shape, generator=generator).double() for r in ranks]
    back = [
        torch.cat([gradient[2 * index : 2 * index + 2] for gradient in gradients])
        for index in range(len(ranks))
    ]
    forward = sum(float((r["exchanged"] * g).sum()) for r, g in zip(ranks, gradients, strict=True))
    backward = sum(float((r["whole"] * b).sum()) for r, b in zip(ranks, back, strict=True))
    assert forward == pytest.approx(backward, rel=1e-12)


def test_an_all_reduce_is_a_gather_of_a_reduce_scatter(ranks: list[dict[str, Any]]) -> None:
    assert torch.equal(torch.cat([rank["piece"] for rank in ranks]), ranks[0]["summed"])
    sent = {event.name: event.bytes for event in ranks[0]["events"]}
    assert sent["sum"] == sent["gather"] + sent["scatter"]


def test_rows_and_objects_of_all_ranks_are_known_to_all(ranks: list[dict[str, Any]]) -> None:
    n = len(ranks)
    for rank in ranks:
        assert rank["rows"].tolist() == [[i, 10 * i] for i in range(n)]
        assert rank["objects"] == [{"rank": i} for i in range(n)]


def test_messages_go_round_the_ring(ranks: list[dict[str, Any]]) -> None:
    for index, rank in enumerate(ranks):
        assert rank["arrived"].tolist() == [float((index - 1) % len(ranks))] * 3
        assert rank["done"]


def test_what_was_sent_is_recorded_once(ranks: list[dict[str, Any]]) -> None:
    n = len(ranks)
    payload = 4 * n * 8
    for index, rank in enumerate(ranks):
        events = rank["events"]
        assert [(e.kind, e.name, e.bytes) for e in events] == [
            ("all_reduce", "sum", 2 * (n - 1) * payload // n),
            ("all_gather", "gather", (n - 1) * payload // n),
            ("reduce_scatter", "scatter", (n - 1) * payload // n),
            ("all_to_all", "exchange", (n - 1) * payload // n),
            ("all_gather", "rows", (n - 1) * 16),
            ("send", "pass", 24),
        ]
        assert {(e.axis, e.rank) for e in events} == {("tp", index)}
        assert all(0 <= e.start <= e.end for e in events)
        assert [e.microbatch for e in events] == [None, None, None, None, None, 5]


def test_strided_tensors_are_refused(rank_pool: RankPool) -> None:
    names = ["reduce", "gather", "gather piece", "scatter piece", "scatter"]
    names += ["exchange received", "exchange sent", "send", "receive"]
    expected = [f"{name}: a strided tensor cannot be sent without a copy" for name in names]
    assert rank_pool.run(targets.strided_tensors, None, world_size=2) == [expected, expected]


def test_a_group_of_one_sends_nothing() -> None:
    events = EventList()
    group = Group("tp", (3,), 3, None, Recorder(3, events))
    x, y = torch.arange(4.0), torch.empty(4)
    group.all_reduce(x, name="a").wait()
    group.all_gather(y, x, name="b").wait()
    assert torch.equal(x, y)
    group.reduce_scatter(y, 2 * x, name="c").wait()
    assert torch.equal(y, 2 * x)
    group.all_to_all(y, x, name="f").wait()
    assert torch.equal(y, x)
    assert group.gather_rows(x, name="d").tolist() == [x.tolist()]
    assert group.gather_objects("e") == ["e"]
    assert (group.size, group.index, events.events) == (1, 0, [])
    assert Pending().done()
