"""Slices off the device: only their buffers take memory on it."""

from __future__ import annotations

import pytest
import torch

from echelon.core.disk import PAGE_BYTES
from echelon.rehearsal.memory import (
    BUFFERS,
    MISSING_WAIT,
    RehearsedCopyStreams,
    RehearsedOffloadStore,
)
from echelon.rehearsal.order import RankLog
from echelon.rehearsal.shapes import META, ShapesOnly


@pytest.fixture
def shapes() -> ShapesOnly:
    return ShapesOnly(RankLog(0))


def store_of(shapes: ShapesOnly, num_buffers: int) -> RehearsedOffloadStore:
    store = RehearsedOffloadStore(META, shapes.memory, shapes.order, num_buffers=num_buffers)
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
        with pytest.raises(AssertionError, match="the caller has all of them"):
            second.wait()
        first.release()
        assert len(second.wait()) == 1


def test_copies_move_nothing() -> None:
    target = torch.ones(3)
    streams = RehearsedCopyStreams(ShapesOnly(RankLog(0)).order, "slices")
    streams.copy("up", [(target, torch.empty(3, device=META))], []).synchronize()
    assert target.tolist() == [1, 1, 1]


def test_copies_are_ordered_by_their_marks(shapes: ShapesOnly) -> None:
    """Sets that are fetched, changed and put hold; without the event of the change, the pair."""
    with shapes:
        store = store_of(shapes, 2)
        for _ in range(2):
            (tensor,) = store.fetch(["a"]).wait()
            store.put(["a"], [tensor.add_(1.0)])
        assert not shapes.flight.misuses
        (tensor,) = store.fetch(["b"]).wait()
        early = store._streams.record_event()
        tensor.add_(1.0)
        store._streams.copy("down", [(torch.empty_like(tensor), tensor)], [early])
    (misuse,) = shapes.flight.misuses
    assert misuse.rule == MISSING_WAIT
    assert "add_ writes on stream compute" in misuse.text
    assert "copy down slices reads on stream slices down" in misuse.text
