"""Ranks that write send what the formula says, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.cost.bytes.generate import CacheSize, cache_size, cache_width, cached_blocks
from echelon.inference.cache import CachedSequence, PagedCache
from echelon.launch.local.supervisor import RankPool
from tests.inference.cases import LATENT, MODELS, PROMPTS
from tests.inference.runs import COUNT, generation_plan, split_name, written
from tests.inference.sent_bytes import GenerationPass, generated_bytes
from tests.parallel.layouts import plan_of


def greedy_passes(prompts: Sequence[int], max_tokens: int, pp: int) -> list[GenerationPass]:
    """Return the passes that write `max_tokens` after prompts of so many tokens, none ending.

    There are as many groups of prompts as stages, where there are so many prompts.
    """
    count = min(pp, len(prompts))
    groups = [prompts[place::count] for place in range(count)]
    first = [GenerationPass(tokens=sum(one), sequences=len(one)) for one in groups]
    later = [GenerationPass(tokens=len(one), sequences=len(one)) for one in groups]
    return first + later * (max_tokens - 1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("gqa", {"tp": 2}),
        ("gqa", {"pp": 2}),
        ("gqa", {"tp": 2, "pp": 2}),
        ("latent", {"tp": 4}),
        ("width-norm", {"tp": 2}),
        ("experts", {"tp": 2, "ep": 2}),
        ("experts", {"tp": 2}),
        ("shared-experts", {"tp": 2, "ep": 2}),
    ],
    ids=split_name,
)
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "drawn"])
def test_ranks_send_the_bytes_of_the_formula(
    name: str, split: dict[str, Any], greedy: bool, rank_pool: RankPool
) -> None:
    plan = generation_plan(name, **split)
    sampling = {} if greedy else {"temperature": 1.0}
    passes = greedy_passes([len(one) for one in PROMPTS], COUNT, plan.mesh.pp)
    for rank, found in enumerate(written(rank_pool, plan, sampling=sampling)):
        assert found.sent == generated_bytes(plan, rank, passes, greedy=greedy)


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
