"""What a rank reads of a checkpoint in which its island is, or is not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echelon.training.checkpoint.index import INDEX_FILE
from echelon.training.local_sgd import checkpoint
from echelon.training.local_sgd.checkpoint import ElasticIslandCheckpoint, IslandCheckpoint


def test_an_island_that_is_not_in_a_checkpoint_reads_what_all_agree_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: Any = SimpleNamespace(islands=SimpleNamespace(index=1, size=2))
    scope = IslandCheckpoint(groups, dict, lambda: None)
    state: Any = {"parameters": {}, "outer.momentum": {}, "island-1.parameters": {}}
    assert scope.within(state, tmp_path) is state
    (tmp_path / INDEX_FILE).touch()
    kinds = {"parameters", "island-0.parameters"}
    monkeypatch.setattr(checkpoint, "read_index", lambda _: SimpleNamespace(tensors=kinds))
    assert set(scope.within(state, tmp_path)) == {"parameters", "outer.momentum"}
    kinds.add("island-1.parameters")
    assert scope.within(state, tmp_path) == state


def test_positions_are_those_of_islands_that_write() -> None:
    groups: Any = SimpleNamespace(islands=SimpleNamespace(index=2, size=3))
    exchange: Any = SimpleNamespace(gather_objects=lambda value: [(0, {"a": 1}), value])
    scope = ElasticIslandCheckpoint(groups, dict, lambda: None, lambda _: (0, exchange))
    told = scope.position({"a": 5}, scope.exchange(0))
    assert told == {"islands": [{"a": 1}, None, {"a": 5}]}
