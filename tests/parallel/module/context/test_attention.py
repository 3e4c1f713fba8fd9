"""Calls of attention as they are seen: heads, and the rule of their mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from echelon.core.attention_mask import AttentionMask
from echelon.core.errors import ConfigError
from echelon.parallel.module.context import CutAttention, SeenAttention, SeenCall, mask_of
from echelon.parallel.storage.gradients import GradientStore, Reduction
from tests.parallel.layouts import plan_of


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


class Kept(CutAttention):
    """Attention that keeps the queries it would attend with."""

    def _over_ranks(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask
    ) -> torch.Tensor:
        self.q = q
        return q


@pytest.mark.parametrize(("scale", "factor"), [(None, 1.0), (0.5, 1.0), (0.25, 0.5)])
def test_queries_are_copied_for_another_scale_only(scale: float | None, factor: float) -> None:
    q = torch.randn(2, 4, 5, 4)
    call = SeenCall(heads=4, kv_heads=4, head_dim=4, mask=AttentionMask(causal=True))
    groups: Any = None
    kept = Kept(plan_of(), groups, GradientStore(Reduction()), [call])
    kept.begin()
    with kept:
        found = functional.scaled_dot_product_attention(q, q, q, is_causal=True, scale=scale)
    torch.testing.assert_close(found, q * factor)
    assert (kept.q.data_ptr() == q.data_ptr()) == (factor == 1.0)
