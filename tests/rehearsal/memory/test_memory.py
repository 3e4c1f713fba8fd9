"""Memory of a rank, by what it is for."""

from __future__ import annotations

import torch

from echelon.rehearsal.memory import BUFFERS, GATHERED, HOST, MemoryMeter, MeteredPool
from echelon.rehearsal.order import RankLog
from echelon.rehearsal.shapes import META, ShapesOnly


def x(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=META)


def test_memory_lives_from_its_making_to_its_end() -> None:
    with ShapesOnly(RankLog(0)) as shapes:
        memory = shapes.memory
        with memory.within("activations"):
            a = x(10)
            view = a[2:]
            b = a + 1
        memory.is_for("messages", [b])
        assert memory.now() == {"activations": 40, "messages": 40}
        del a
        assert memory.now() == {"activations": 40, "messages": 40}
        del view
        assert memory.now() == {"messages": 40}
        assert memory.peak_bytes == 80
        memory.forget_peak()
        assert memory.peak_bytes == 40
        del b
        assert memory.now() == {}


def test_what_is_on_the_host_is_not_counted() -> None:
    meter = MemoryMeter()
    with meter.within(HOST):
        meter.made(kept := x(10))
    assert (meter.now(), meter.peak_bytes, len(kept)) == ({}, 0, 10)


def test_each_term_has_a_most_of_its_own() -> None:
    meter = MemoryMeter()
    with meter.within(BUFFERS):
        meter.made(first := x(10))
    del first
    with meter.within(GATHERED):
        meter.made(second := x(5))
    assert meter.most == {BUFFERS: 40, GATHERED: 20}
    assert meter.at_peak == {BUFFERS: 40}
    meter.action_ended("F0.0")
    assert [(one.action, one.kept, one.peak_bytes) for one in meter.points] == [
        ("F0.0", {GATHERED: 20}, 40)
    ]
    assert len(second) == 5


def test_what_a_pool_takes_back_is_free_whoever_still_points_to_it() -> None:
    released: list[int] = []
    with ShapesOnly(RankLog(0)) as shapes:
        pool = MeteredPool(META, shapes.memory, released.append)
        with shapes.memory.within(GATHERED):
            piece = pool.take(100)
            view = piece[10:]
        assert shapes.memory.now() == {GATHERED: 100}
        pool.give_back(piece)
        assert shapes.memory.now() == {}
        again = pool.take(100)
        assert again is not piece
        assert released == [piece.untyped_storage()._cdata]
        del piece, view
        assert shapes.memory.now() == {"other": 100}
