"""The readable attention against one query at a time, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from echelon.core.attention_mask import AttentionMask
from echelon.models.attention.reference import ScoreForm, attention_reference, visible
from tests.models.attention.cases import MASKS, RUNS, case, positions


def test_visible_is_the_rule_of_the_mask_and_the_documents() -> None:
    for rule, documents in MASKS.values():
        for queries, keys in RUNS.values():
            query_T, key_S = positions(queries), positions(keys)
            found = visible(query_T, key_S, rule, documents)
            assert found.dim() == (2 if documents is None else 3)
            for b, starts in enumerate(documents or ((0,),)):
                wanted = [
                    [
                        rule.allows(p, j)
                        and max(s for s in starts if s <= p) == max(s for s in starts if s <= j)
                        for j in key_S.tolist()
                    ]
                    for p in query_T.tolist()
                ]
                assert (found if documents is None else found[b]).tolist() == wanted


@pytest.mark.parametrize("soft_cap", [None, 0.5])
def test_each_query_is_a_weighted_mean_of_the_values_it_meets(soft_cap: float | None) -> None:
    one = case("zigzag, gathered", "documents in a window")
    out, lse = attention_reference(one.q, one.k, one.v, one.seen, ScoreForm(soft_cap=soft_cap))
    for t in range(0, one.q.shape[0], 3):
        for b in range(2):
            for h in range(4):
                scores = one.k[:, b, h // 2] @ one.q[t, b, h] / math.sqrt(one.q.shape[-1])
                if soft_cap is not None:
                    scores = soft_cap * (scores / soft_cap).tanh()
                weights = scores.exp() * one.seen[b, t]
                mean = weights @ one.v[:, b, h // 2] / weights.sum()
                torch.testing.assert_close(out[t, b, h], mean, rtol=0.0, atol=1e-13)
                torch.testing.assert_close(lse[b, h, t], weights.sum().log())


def test_a_query_that_meets_nothing_gives_nothing_and_finite_gradients() -> None:
    one = case("striped, later", "causal")
    q, k, v = (x.detach().requires_grad_() for x in (one.q, one.k, one.v))
    out, lse = attention_reference(q, k, v, one.seen)
    assert not out[0].any()
    assert bool((lse[:, :, 0] == float("-inf")).all())
    dq, dk, dv = torch.autograd.grad(out.sum() + lse[:, :, 1:].sum(), (q, k, v))
    assert not dq[0].any()
    assert all(bool(x.isfinite().all()) for x in (dq, dk, dv))


def test_a_narrow_dtype_has_wide_scores() -> None:
    at = torch.arange(40)
    one = case("whole", "causal", dtype=torch.bfloat16)
    out, lse = attention_reference(one.q, one.k, one.v, visible(at, at, AttentionMask(), None))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
