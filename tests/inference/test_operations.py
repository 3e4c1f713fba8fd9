"""Mistakes that are planted into generation are found, and said to be where they show."""

from __future__ import annotations

import re

import pytest
import torch

from echelon.core.attention_mask import AttentionMask
from echelon.inference.operations import CachedAttention
from echelon.launch.local.supervisor import RankPool
from echelon.models.attention.reference import ScoreForm, attention_reference, visible
from tests.inference.cases import PROMPTS, first_difference, without_cache
from tests.inference.mistakes import MISTAKES
from tests.inference.runs import COUNT, generation_plan, written

CAUGHT = {
    "reads_one_position_less": ("gqa", {}),
    "turns_by_the_next_position": ("gqa", {}),
    "writes_one_position_late": ("gqa", {}),
    "every_rank_keeps_the_first_heads": ("gqa", {"tp": 2}),
    "gives_a_block_to_two": ("gqa", {}),
    "forgets_a_sum": ("gqa", {"tp": 2}),
    "sees_padding": ("gqa", {}),
    "forgets_the_cap": ("soft-cap", {}),
    "forgets_the_window": ("window", {}),
}

LENGTH, HEADS, KEYS, WIDTH = 11, 6, 2, 4


def test_every_mistake_has_a_case() -> None:
    assert set(CAUGHT) == set(MISTAKES)


@pytest.mark.one_in(2)
@pytest.mark.system("S16")
@pytest.mark.parametrize("mistake", CAUGHT)
def test_a_planted_mistake_is_named_by_the_first_token_that_differs(
    mistake: str, rank_pool: RankPool
) -> None:
    name, split = CAUGHT[mistake]
    plan = generation_plan(name, **split)
    found = written(rank_pool, plan, "tests.inference.mistakes:write_with_mistake", mistake=mistake)
    told = first_difference(found[0].texts, without_cache(plan, PROMPTS, COUNT))
    assert re.fullmatch(r"prompt \d, token \d+: \d+ instead of \d+", told)


def random_heads(seed: int, heads: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LENGTH, heads, WIDTH, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 3])
def test_prompts_and_next_tokens_find_what_the_reference_finds(
    window: int | None, soft_cap: float | None
) -> None:
    q, k, v = random_heads(0, HEADS), random_heads(1, KEYS), random_heads(2, KEYS)
    mask = AttentionMask(window=window)
    rule = CachedAttention(scale=WIDTH**-0.5, mask=mask, soft_cap=soft_cap, prompt_queries=4)
    at = torch.arange(LENGTH)
    seen = visible(at, at, mask, None)
    found = attention_reference(
        q[:, None], k[:, None], v[:, None], seen, ScoreForm(soft_cap=soft_cap)
    )
    expected = found[0][:, 0]
    assert torch.allclose(rule.of_prompt(q, k, v), expected, atol=1e-12)
    # Each position as one of a batch: what is beyond it is masked.
    keys, values = (x.expand(LENGTH, *x.shape) for x in (k, v))
    assert torch.allclose(rule.of_next(q, keys, values, seen), expected, atol=1e-12)


def test_values_may_be_narrower_than_keys() -> None:
    q, k = random_heads(0, HEADS), random_heads(1, 1)
    rule = CachedAttention(scale=1.0, mask=AttentionMask())
    whole = rule.of_prompt(q, k, k)
    assert torch.allclose(rule.of_prompt(q, k, k[..., :3]), whole[..., :3], atol=1e-12)
