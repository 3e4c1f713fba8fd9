"""Pools and bounded buffers lend the same memory in turn, poisoned in between."""

from __future__ import annotations

import torch

from echelon.parallel.completion.in_flight import InFlight
from echelon.parallel.completion.late_memory import LateBufferPool, LateBuffers
from echelon.parallel.completion.race import Race, RaceKind
from echelon.parallel.offload.buffers import plain_memory
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
