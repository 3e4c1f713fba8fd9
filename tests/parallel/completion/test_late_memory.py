"""Pools and bounded buffers lend the same memory in turn, poisoned in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.parallel.completion.in_flight import InFlight, Race, RaceKind
from echelon.parallel.completion.late_memory import (
    LateBufferPool,
    LateBuffers,
    LateCopyStreams,
    LateFileOffloadStore,
)
from echelon.parallel.offload.host_memory import plain_memory
from echelon.parallel.recompute import HostActivations
from echelon.parallel.tensor_memory import PooledTensorMemory

CPU = torch.device("cpu")


def test_a_released_tensor_reads_as_nothing_until_it_is_filled_again() -> None:
    races: list[Race] = []
    pool = LateBufferPool(CPU, InFlight(0, 0, races.append))
    memory = PooledTensorMemory(4, torch.float32, pool)
    memory.flat.fill_(1.0)
    memory.release()
    assert memory.flat.isnan().all()
    memory.allocate()
    memory.release()
    assert pool.num_buffers == 1
    assert not races


def test_a_piece_that_is_given_back_twice_is_lent_once() -> None:
    races: list[Race] = []
    pool = LateBufferPool(CPU, InFlight(0, 0, races.append))
    piece = pool.take(16)
    pool.give_back(piece)
    pool.give_back(piece)
    assert [race.kind for race in races] == [RaceKind.FREED_TWICE]
    assert pool.take(16) is piece
    assert pool.take(16) is not piece


def test_a_buffer_that_is_too_small_is_forgotten() -> None:
    races: list[Race] = []
    flight = InFlight(0, 0, races.append)
    buffers = LateBuffers[str](1, plain_memory, flight)
    small = buffers.take(8, "a")
    assert small is not None
    buffers.give_back(small)
    assert (small == 0xFF).all()
    flight.use(small, by="mm", writes=False, reads=True)
    assert [race.kind for race in races] == [RaceKind.USED_FREED]
    large = buffers.take(10**4, "b")
    assert large is not None
    # Its addresses may be anybody's now.
    flight.use(small, by="add", writes=False, reads=True)
    assert len(races) == 1
    buffers.give_back(large)
    buffers.clear()
    flight.use(large, by="add", writes=False, reads=True)
    assert len(races) == 1


def test_a_copy_is_seen_when_its_end_is_waited_for() -> None:
    races: list[Race] = []
    streams = LateCopyStreams(InFlight(0, 0, races.append), "slices")
    source, (one, two) = torch.ones(2), torch.zeros(2, 2)
    first = streams.copy("up", [(one, source)], [streams.record_event()])
    second = streams.copy("up", [(two, source)], [])
    assert one.isnan().all()
    streams.wait_for(second)
    first.synchronize()
    assert one.tolist() == two.tolist() == [1.0, 1.0]
    assert not races


def test_a_copy_waits_for_the_marks_that_it_is_given() -> None:
    races: list[Race] = []
    streams = LateCopyStreams(InFlight(0, 0, races.append), "slices")
    host, back = torch.zeros(2), torch.zeros(2)
    down = streams.copy("down", [(host, torch.ones(2))], [])
    up = streams.copy("up", [(back, host)], [down])
    up.synchronize()
    assert back.tolist() == [1.0, 1.0]
    assert not races


def test_a_source_that_changes_under_a_copy_is_told() -> None:
    races: list[Race] = []
    streams = LateCopyStreams(InFlight(0, 0, races.append), "slices")
    source = torch.ones(2)
    mark = streams.copy("down", [(torch.zeros(2), source)], [])
    source.zero_()
    mark.synchronize()
    assert [(race.kind, race.operation) for race in races] == [
        (RaceKind.CHANGED, "copy down slices")
    ]


def test_activations_come_back_as_they_were() -> None:
    races: list[Race] = []
    streams = LateCopyStreams(InFlight(0, 0, races.append), "activations")
    host = HostActivations(lambda _: streams)
    forward_pass = object()
    kept = [torch.full((2,), float(one)) for one in range(3)]
    stored = [host.store(x, forward_pass) for x in kept]
    taken = [one.take().tolist() for one in stored[::-1]]
    assert taken == [[2.0, 2.0], [1.0, 1.0], [0.0, 0.0]]
    assert not races


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
