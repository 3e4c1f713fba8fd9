"""Slices in a file are not there before they are awaited, and in flight until they are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.parallel.completion.in_flight import InFlight, Race, RaceKind
from echelon.parallel.completion.late_files import LateFileOffloadStore


@pytest.fixture
def races() -> list[Race]:
    """Return the races that the store of a test has told."""
    return []


@pytest.fixture
def store(tmp_path: Path, races: list[Race]) -> LateFileOffloadStore:
    """Return a store of two keys of three numbers."""
    store = LateFileOffloadStore(tmp_path, 0, 2, InFlight(0, 0, races.append))
    for key in ("a", "b"):
        store.add(key, 3, torch.float32)
    return store


def test_what_is_put_comes_back(store: LateFileOffloadStore, races: list[Race]) -> None:
    for number in range(4):
        (tensor,) = store.fetch(["a"]).wait()
        assert tensor.tolist() == [float(number)] * 3
        store.put(["a"], [tensor.add_(1.0)])
    store.flush()
    assert store.view("a").tolist() == [4.0] * 3
    store.fetch(["b"]).release()
    store.put(["b"], [torch.full((3,), 7.0)])
    assert store.view("b").tolist() == [7.0] * 3
    store.close()
    assert not races


def test_what_nobody_has_waited_for_is_poison(store: LateFileOffloadStore) -> None:
    found = store.fetch(["a"])
    assert found.tensors()[0].isnan().all()
    assert found.wait()[0].tolist() == [0.0] * 3
    written = store.fetch(["b"], read=False)
    assert written.wait()[0].isnan().all()
    store.close()


def test_a_buffer_that_is_written_is_not_the_callers(
    store: LateFileOffloadStore, races: list[Race]
) -> None:
    (tensor,) = store.fetch(["a"]).wait()
    store.put(["a"], [tensor.fill_(1.0)])
    tensor.zero_()
    assert store.view("a").tolist() == [1.0] * 3
    assert [(race.kind, race.operation) for race in races] == [(RaceKind.CHANGED, "write a")]
    store.close()
