"""The pool has the blocks that sequences need, no more and no fewer, whatever the window."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.cost.bytes.cache import CacheSize, cache_size, cache_width, cached_blocks
from echelon.inference.cache import CachedSequence, PagedCache
from tests.inference.cases import LATENT, MODELS
from tests.parallel.layouts import plan_of

SMALL = st.integers(1, 20)


def most_held(prompt: int, max_tokens: int, block_tokens: int, window: int | None) -> int:
    """Return the most blocks that a sequence holds while it is written, as a cache counts."""
    size = CacheSize(num_blocks=99, block_tokens=block_tokens, layers=1, width=1, element_bytes=4)
    cache = PagedCache(size, [0], window, torch.float32, torch.device("cpu"))
    one = CachedSequence(number=0, tokens=[], prompt_tokens=prompt)
    most = 0
    for until in range(prompt, prompt + max_tokens):
        cache.extend(one, until)
        most = max(most, len(one.blocks))
        assert cache.num_free == 99 - len(one.blocks)
    return most


@given(SMALL, st.integers(1, 40), st.integers(1, 7), st.none() | st.integers(1, 25))
def test_blocks_are_the_most_that_a_sequence_holds(
    prompt: int, max_tokens: int, block_tokens: int, window: int | None
) -> None:
    found = cached_blocks(prompt, max_tokens, block_tokens, window)
    assert found == most_held(prompt, max_tokens, block_tokens, window)


def test_a_token_keeps_its_heads_or_its_narrow_vector() -> None:
    assert LATENT.latent is not None
    gqa = MODELS["gqa"]
    assert cache_width(gqa, 1) == 2 * gqa.kv_heads * gqa.head_dim
    assert cache_width(gqa, 2) * 2 == cache_width(gqa, 1)
    assert cache_width(LATENT, 1) == cache_width(LATENT, 4) == 12


def test_bytes_are_those_of_all_pools() -> None:
    plan = plan_of(model=MODELS["gqa"], tp=2)
    size = cache_size(plan, 3, [5, 1], max_tokens=4, block_tokens=4)
    # 8 and 4 positions: 2 blocks and 1; one head of 4 numbers, keys and values, fp64.
    assert size.num_bytes == (2 + 1) * 4 * (2 * 1 * 4) * 8 * 3
