"""Slices off the device: only their buffers take memory on it."""

from __future__ import annotations

import pytest
import torch

from echelon.core.disk import PAGE_BYTES
from echelon.rehearsal.memory import BUFFERS, RehearsedCopyStreams, RehearsedOffloadStore
from echelon.rehearsal.order import RankLog
from echelon.rehearsal.shapes import META, ShapesOnly


@pytest.fixture
def shapes() -> ShapesOnly:
    return ShapesOnly(RankLog(0))


def store_of(shapes: ShapesOnly, num_buffers: int) -> RehearsedOffloadStore:
    store = RehearsedOffloadStore(META, shapes.memory, num_buffers=num_buffers)
    for key in "abc":
        store.add(key, PAGE_BYTES, torch.float32)
    return store


def test_sets_take_a_buffer_while_they_are_on_the_device(shapes: ShapesOnly) -> None:
    with shapes:
        store = store_of(shapes, 2)
        assert shapes.memory.now() == {}
        first = store.fetch(["a", "b"])
        one, two = first.wait()
        assert (one.shape, one.dtype, one.device) == ((PAGE_BYTES,), torch.float32, META)
        assert one.untyped_storage()._cdata == two.untyped_storage()._cdata
        assert shapes.memory.now() == {BUFFERS: 8 * PAGE_BYTES}
        store.put(["a", "b"], [one, two])
        second = store.fetch(["b", "c"])
        assert second.wait()[0].untyped_storage()._cdata == one.untyped_storage()._cdata
        second.release()
        second.release()
        assert shapes.memory.now() == {BUFFERS: 8 * PAGE_BYTES}


def test_a_set_waits_until_a_buffer_is_free(shapes: ShapesOnly) -> None:
    with shapes:
        store = store_of(shapes, 1)
        first, second = store.fetch(["a"]), store.fetch(["b"])
        assert (first.arrived(), second.arrived()) == (True, False)
        with pytest.raises(AssertionError, match="all are taken"):
            second.wait()
        first.release()
        assert len(second.wait()) == 1


def test_copies_move_nothing() -> None:
    target = torch.ones(3)
    RehearsedCopyStreams().copy("up", [(target, torch.empty(3, device=META))], []).synchronize()
    assert target.tolist() == [1, 1, 1]
