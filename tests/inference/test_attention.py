"""Attention over keys that are there equals the reference, of a prompt and token by token."""

from __future__ import annotations

import pytest
import torch

from echelon.core.attention_mask import AttentionMask
from echelon.inference import attention
from echelon.inference.attention import CachedAttention
from echelon.models.attention.reference import ScoreForm, attention_reference, visible

LENGTH, HEADS, KEYS, WIDTH = 11, 6, 2, 4


def random_heads(seed: int, heads: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LENGTH, heads, WIDTH, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 3])
def test_prompts_and_next_tokens_find_what_the_reference_finds(
    window: int | None, soft_cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_QUERIES", 4)
    q, k, v = random_heads(0, HEADS), random_heads(1, KEYS), random_heads(2, KEYS)
    mask = AttentionMask(window=window)
    rule = CachedAttention(scale=WIDTH**-0.5, mask=mask, soft_cap=soft_cap)
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
