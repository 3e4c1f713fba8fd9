"""What kernels are given and give: where a piece lies, and what hides a key."""

from __future__ import annotations

import torch

from echelon.core.attention_mask import Band
from echelon.models.attention.fused import FusedCpuKernel
from echelon.models.attention.interface import AttentionGradients, SavedAttention, ScoreRule
from echelon.models.attention.plain import PlainKernel

FULL, CAUSAL, EDGE = Band(None, None), Band(0, None), Band(0, 3)


def test_gradients_are_added_where_a_piece_lies() -> None:
    q, k = torch.zeros(2, 1, 1, 2), torch.zeros(3, 1, 1, 2)
    total = AttentionGradients.zeros(q.bfloat16(), k.bfloat16(), k.bfloat16())
    assert {x.dtype for x in total} == {torch.float32}


def test_no_score_of_float16_is_so_large_that_a_hidden_key_shows() -> None:
    """Scores of 6e4 and more apart, beside which half of the least float16 is nothing."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(6, 1, 2, 16, generator=generator) for _ in range(3))
    q, k, v = (q * 250).half(), (k * 250).half(), v.half()
    scores = ScoreRule(band=EDGE, scale=1.0)
    assert float((q.float() * k.float()).sum(-1).abs().max()) > 2 * 65504
    dout = torch.randn(6, 1, 2, 16, generator=generator).half()
    results = []
    for kernel in (FusedCpuKernel(), PlainKernel()):
        out, lse = kernel.forward(q, k, v, scores)
        gradients = kernel.backward(dout, SavedAttention(q, k, v, out.half(), lse), scores)
        assert lse.isfinite().all()
        assert all(x.isfinite().all() for x in gradients)
        results.append((out.float(), lse.float()))
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-3, atol=1e-3)
