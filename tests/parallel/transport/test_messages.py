"""Messages of different sizes between any members of a group arrive, and are recorded once."""

from __future__ import annotations

import pytest
import torch

from echelon.core.event import EventList
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.recorder import Recorder
from tests.parallel.transport import exchange_targets as targets
from tests.parallel.transport.exchange_targets import length, message


@pytest.mark.parametrize("world", [2, 3, 4])
def test_messages_of_all_sizes_arrive(rank_pool: RankPool, world: int) -> None:
    ranks = rank_pool.run(targets.exchange, 3, world_size=world)
    for me, rank in enumerate(ranks):
        for round_, received in enumerate(rank.received):
            others = [a for a in range(world) if a != me and length(a, me)]
            if round_ == 1:
                others = [0] if me == 1 else []
            assert sorted(received) == others
            for source, tensor in received.items():
                assert torch.equal(tensor, message(source, me, round_))
        assert rank.refusal == "strided: a strided tensor cannot be sent without a copy"


@pytest.mark.parametrize("world", [2, 3])
def test_what_a_rank_sends_is_recorded_once(rank_pool: RankPool, world: int) -> None:
    ranks = rank_pool.run(targets.exchange, 2, world_size=world)
    for me, rank in enumerate(ranks):
        sent = 8 * sum(length(me, other) for other in range(world) if other != me)
        alone = 8 * length(0, 1) if me == 0 else 0
        events = [(event.kind, event.name, event.bytes, event.axis) for event in rank.events]
        assert events == [
            ("all_to_all", "round 1", alone, "tp"),
            ("all_to_all", "round 0", sent, "tp"),
        ]


def test_a_group_of_one_exchanges_nothing() -> None:
    events = EventList()
    group = Group("stage", (5,), 5, None, Recorder(5, events))
    group.exchange({}, {}, name="nothing").wait()
    assert events.events == []
