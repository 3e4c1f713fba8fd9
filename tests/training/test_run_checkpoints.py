"""What a rank reads of a checkpoint in which its island is, or is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from echelon.training.local_sgd.checkpoint import held_in, positions_told


def test_an_island_that_is_not_in_a_checkpoint_reads_what_all_agree_on() -> None:
    state: Any = {"parameters": {}, "outer.momentum": {}, "island-1.parameters": {}}
    without = cast(Any, SimpleNamespace(tensors={"parameters": {}, "island-0.parameters": {}}))
    assert set(held_in(state, without)) == {"parameters", "outer.momentum"}
    whole = cast(Any, SimpleNamespace(tensors={**without.tensors, "island-1.parameters": {}}))
    assert held_in(state, whole) == state


def test_positions_are_those_of_islands_that_write() -> None:
    groups: Any = SimpleNamespace(islands=SimpleNamespace(index=2, size=3))
    exchange: Any = SimpleNamespace(gather_objects=lambda value: [(0, {"a": 1}), value])
    told = positions_told({"a": 5}, groups, exchange)
    assert told == {"islands": [{"a": 1}, None, {"a": 5}]}
