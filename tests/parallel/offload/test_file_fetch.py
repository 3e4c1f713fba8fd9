"""A set of a fetch: where its keys lie in the file and in its buffer."""

from __future__ import annotations

import pytest
import torch

from echelon.core.offload_file import PAGE_BYTES
from echelon.parallel.offload.file_fetch import FileExtent, FileFetch

SMALL = FileExtent(key="small", start=0, numel=3, dtype=torch.float64)
LARGE = FileExtent(key="large", start=PAGE_BYTES, numel=PAGE_BYTES, dtype=torch.int16)


def fetched() -> FileFetch:
    """Return a set that has its buffer and has been read."""
    found = FileFetch([SMALL, LARGE], read=True, wait_for=FileFetch.tensors, release=lambda _: None)
    found.buffer = torch.zeros(found.size, dtype=torch.uint8)
    found.phase = "ready"
    return found


def test_a_key_takes_whole_pages() -> None:
    assert (SMALL.num_bytes, SMALL.span_bytes) == (24, PAGE_BYTES)
    assert (LARGE.num_bytes, LARGE.span_bytes) == (2 * PAGE_BYTES, 2 * PAGE_BYTES)
    assert fetched().size == 3 * PAGE_BYTES


def test_tensors_are_views_of_the_buffer_in_the_order_of_the_keys() -> None:
    found = fetched()
    small, large = found.wait()
    assert (small.dtype, small.shape) == (torch.float64, (3,))
    assert (large.dtype, large.shape) == (torch.int16, (PAGE_BYTES,))
    large.fill_(-1)
    assert found.buffer is not None
    assert int(found.buffer.count_nonzero()) == 2 * PAGE_BYTES
    assert not small.any()


def test_a_set_has_arrived_from_ready_on() -> None:
    found = FileFetch([SMALL], read=True, wait_for=FileFetch.tensors, release=lambda _: None)
    assert not found.arrived()
    found.phase = "reading"
    assert not found.arrived()
    assert fetched().arrived()
    assert repr(fetched()) == "the set of small, large"


def test_only_its_own_tensors_are_put() -> None:
    found = fetched()
    small, large = found.tensors()
    parts = found.parts_of(["large"], [large])
    assert [(place.key, part.nbytes) for place, part in parts] == [("large", 2 * PAGE_BYTES)]
    with pytest.raises(AssertionError, match=r"another key's place"):
        found.parts_of(["large", "small"], [small, large])
    with pytest.raises(AssertionError, match=r"is put as torch\.int64"):
        found.parts_of(["small"], [small.view(torch.int64)])
    with pytest.raises(AssertionError, match=r"is put as \[2\]"):
        found.parts_of(["small"], [small[:2]])
    found.phase = "done"
    with pytest.raises(AssertionError, match="not the caller's any more"):
        found.parts_of(["small"], [small])
