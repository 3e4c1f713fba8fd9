"""What a checkpoint has of islands; resuming is tested with the loop."""

from __future__ import annotations

from typing import Any

import torch

from echelon.core.event import NoEvents
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine
from echelon.training.local_sgd.checkpoint import IslandCheckpoint
from tests.parallel.layouts import plan_of


def engine() -> TrainEngine:
    return TrainEngine(plan_of(), Recorder(0, NoEvents()), torch.device("cpu"))


def test_without_islands_it_is_what_the_optimizer_keeps() -> None:
    one = engine()
    assert set(one.checkpoint_state()) == {
        "parameters",
        "optimizer.exp_avg",
        "optimizer.exp_avg_sq",
    }
    assert set(one.shared_state()) == set(one.parameters())
    position = one.position()
    assert one.parts.scope.position(position, one.groups.world) is position
    assert one.parts.scope.position_of(position) is position


class _Two:
    """Two islands, of which this is the second."""

    size, index = 2, 1

    def gather_objects(self, value: Any) -> list[Any]:
        return [{"num_updates": 7}, value]


class _Groups:
    islands = _Two()


def test_each_island_stands_where_it_stood() -> None:
    groups: Any = _Groups()
    scope = IslandCheckpoint(groups, dict, lambda: None)
    told = scope.position({"num_updates": 9}, groups.islands)
    assert told == {"islands": [{"num_updates": 7}, {"num_updates": 9}]}
    assert scope.position_of(told) == {"num_updates": 9}
    assert scope.position_of({"islands": [1]}) == {}
    assert scope.position_of("nothing") == "nothing"
