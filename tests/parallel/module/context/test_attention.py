"""Calls of attention as they are seen: heads, and the rule of their mask."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from echelon.core.attention_mask import AttentionMask
from echelon.core.errors import ConfigError
from echelon.parallel.module.context.attention import SeenAttention, SeenCall, mask_of


def test_a_call_is_seen_and_made() -> None:
    q, k = torch.randn(2, 4, 5, 3), torch.randn(2, 2, 5, 3)
    expected = functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    seen = SeenAttention()
    with seen:
        found = functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    assert torch.equal(found, expected)
    assert seen.calls == [
        SeenCall(heads=4, kv_heads=2, head_dim=3, mask=AttentionMask(causal=True))
    ]
    with seen, pytest.raises(ConfigError, match="of its weights"):
        functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    with seen, pytest.raises(ConfigError, match="meet keys"):
        functional.scaled_dot_product_attention(q[:, :, :1], q, q)


def test_the_rule_of_a_mask() -> None:
    places = torch.arange(6)
    ahead = places[:, None] - places
    causal, window = ahead >= 0, (ahead >= 0) & (ahead < 3)
    assert mask_of(causal.expand(2, 1, 6, 6)) == AttentionMask(causal=True)
    assert mask_of(window) == AttentionMask(causal=True, window=3)
    assert mask_of(torch.zeros(6, 6).masked_fill(~window, -1e30)) == mask_of(window)
    assert mask_of(torch.ones(6, 6, dtype=torch.bool)) == AttentionMask(causal=False)


def test_masks_without_a_rule() -> None:
    places = torch.arange(6)
    causal = places[:, None] >= places
    padded = torch.stack((causal, causal & (places < 4)))
    holes = causal & (places != 2)
    bias = torch.where(causal, 0.0, -1.0)
    for mask, said in [(padded, "same for all"), (holes, "neither causal"), (bias, "adds")]:
        with pytest.raises(ConfigError, match="module-attention") as caught:
            mask_of(mask)
        assert said in str(caught.value)
