"""Two ranks meet through the store, without the process group of all."""

from __future__ import annotations

import pytest
import torch

from echelon.core.event import EventList
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.launch.process_group import PrefixStore
from echelon.parallel.transport.pair import StoreGroup
from echelon.parallel.transport.recorder import Recorder


def greet(context: RankContext, _: object) -> dict[str, object]:
    """Send the last rank a tensor, twice: the first end is gone after the first time."""
    events = EventList()
    recorder = Recorder(context.rank, events)
    first, last = 0, context.world_size - 1
    if context.rank not in (first, last):
        return {}
    told: list[float] = []
    for attempt in range(2):
        place = PrefixStore(f"greet/{attempt}", context.store)
        pair = StoreGroup("servers", (first, last), recorder, place, 20.0)
        if context.rank == first:
            pair.send(torch.full((3,), attempt + 1.0), 1, name="hello", tag=attempt).wait()
        else:
            values = torch.zeros(3)
            pair.receive(values, 0, name="hello", tag=attempt).wait()
            told += values.tolist()
            if context.rank == last and not attempt:
                context.store.set("heard", "1")
        context.store.wait(["heard"])
    return {"told": told, "bytes": events.bytes_by_axis()}


def test_a_pair_needs_no_other_rank_and_can_be_made_anew(rank_pool: RankPool) -> None:
    """S07: the middle rank takes no part; bytes are counted as in any group."""
    sender, nobody, receiver = rank_pool.run(f"{__name__}:greet", None, 3)

    assert nobody == {}
    assert receiver == {"told": [1.0] * 3 + [2.0] * 3, "bytes": {}}
    assert sender == {"told": [], "bytes": {"servers": 24}}


def test_a_strided_tensor_is_not_sent(rank_pool: RankPool) -> None:
    """S07: as in any group."""
    assert rank_pool.run(f"{__name__}:send_strided", None, 2) == [True, True]


def send_strided(context: RankContext, _: object) -> bool:
    """Say whether a strided tensor is refused."""
    recorder = Recorder(context.rank, EventList())
    pair = StoreGroup("servers", (0, 1), recorder, PrefixStore("strided", context.store), 20.0)
    strided = torch.zeros(4, 4)[:, 0]
    with pytest.raises(ValueError, match="strided"):
        pair.send(strided, 1 - context.rank, name="hello", tag=0)
    return True
