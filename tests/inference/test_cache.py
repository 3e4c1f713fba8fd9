"""Rows of the pools: whose they are, and that what is given back is used again."""

from __future__ import annotations

import pytest
import torch

from echelon.cost.bytes.generate import CacheSize
from echelon.inference.cache import CachedSequence, PagedCache


def cache_of(num_blocks: int, window: int | None = None) -> PagedCache:
    size = CacheSize(num_blocks=num_blocks, block_tokens=4, layers=2, width=3, element_bytes=4)
    return PagedCache(size, [5, 6], window, torch.float32, torch.device("cpu"))


def sequence(number: int) -> CachedSequence:
    return CachedSequence(number=number, tokens=[1], prompt_tokens=1)


def test_no_two_sequences_share_a_row() -> None:
    cache, both = cache_of(6), (sequence(0), sequence(1))
    for until in (1, 5, 6, 11):
        for one in both:
            assert cache.extend(one, until).stop == until
    rows = torch.cat([cache.slots(one, range(11)) for one in both])
    assert rows.unique().numel() == 22
    assert cache.num_free == 0
    with pytest.raises(IndexError):
        cache.extend(both[0], 13)


def test_blocks_outside_of_the_window_and_of_the_dead_go_back() -> None:
    cache, one = cache_of(3, window=5), sequence(0)
    assert cache.extend(one, 11) == range(6, 11)
    assert (one.first_block, len(one.blocks), cache.num_free) == (1, 2, 1)
    first = one.blocks[0]
    assert cache.extend(one, 13) == range(11, 13)
    assert first not in one.blocks
    assert one.first_block == 2
    cache.release(one)
    assert cache.num_free == 3


def test_what_is_written_is_read_a_view_where_rows_follow() -> None:
    cache, one = cache_of(2), sequence(0)
    cache.extend(one, 6)
    rows = torch.arange(18.0).view(6, 3)
    slots = cache.slots(one, range(6))
    cache.write(6, slots, rows)
    assert torch.equal(cache.read(6, slots), rows)
    assert not cache.pools[5].any()
    view = cache.read(6, slice(0, 6))
    assert view.data_ptr() == cache.pools[6].data_ptr()
    assert cache.num_bytes == cache.size.num_bytes == 2 * 8 * 3 * 4
