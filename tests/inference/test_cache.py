"""Rows of the pools: whose they are, and that what is given back is used again."""

from __future__ import annotations

import pytest
import torch

from echelon.cost.bytes.generate import CacheSize
from echelon.inference.cache import CachedSequence, PagedCache
from echelon.launch.local.supervisor import RankPool
from tests.inference.cases import PROMPTS, sequences_of, without_cache
from tests.inference.runs import COUNT, generation_plan, written

END = 36
DOCUMENTS = (
    ([3, 1, 4, END, 5, 9], [5, 9]),
    ([3, END, END, END, 2, 7, 1], [2, 7, 1]),
    ([END, 8, 2], [8, 2]),
    ([31, 30], [31, 30]),
)
"""Prompts with ends of documents, and the last document of each."""


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


@pytest.mark.quick("gqa-1")
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["gqa", "window", "latent"])
def test_separate_documents_of_a_prompt_do_not_meet(
    name: str, tp: int, rank_pool: RankPool
) -> None:
    """Rotary positions are relative: the text is that after the last document alone."""
    plan = generation_plan(name, tp=tp)
    prompts, alone = zip(*DOCUMENTS, strict=True)
    for found in written(rank_pool, plan, prompts=prompts, separator=END, end=END):
        assert found.texts == without_cache(plan, alone, COUNT, END)
        assert found.num_free == found.num_blocks
    (joined,) = written(rank_pool, generation_plan(name), prompts=prompts, end=END)
    assert joined.texts != without_cache(plan, alone, COUNT, END)


def test_a_document_starts_behind_the_last_of_ends_in_a_row() -> None:
    (sequence,) = sequences_of([[END, 4, END, END]], END)
    assert sequence.document_starts() == [0, 1]
    sequence.tokens.append(7)
    assert sequence.document_starts() == sequence.of_kind(1).document_starts() == [0, 1, 4]


@pytest.mark.quick("gqa-3", "window-1")
@pytest.mark.parametrize("block_tokens", [1, 3, 16, 64])
@pytest.mark.parametrize("name", ["gqa", "window"])
def test_the_size_of_blocks_changes_nothing(
    name: str, block_tokens: int, rank_pool: RankPool
) -> None:
    plan = generation_plan(name)
    (found,) = written(rank_pool, plan, block_tokens=block_tokens)
    assert found.texts == without_cache(plan, PROMPTS, COUNT)
