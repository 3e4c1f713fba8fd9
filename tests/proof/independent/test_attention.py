"""Attention, masks and rotary positions, beside PyTorch's and by their own properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.proof.independent.attention import (
    ScoreSettings,
    attend,
    grouped_attention,
    latent_attention,
    turned,
    turns_of,
)
from tests.parallel.layouts import NANO
from tests.proof.independent.running import random_weights, sequence_run
from tests.training.weights.transformers_models import DEEPSEEK

CAUSAL = ScoreSettings(
    causal=True, window=None, other_window=None, soft_cap=None, scale=0.5, head_dim=4
)


def heads(number: int, seed: int) -> torch.Tensor:
    """Return random heads of 6 positions."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, number, 4, generator=generator, dtype=torch.float64)


def test_grouped_heads_are_pytorchs() -> None:
    q, k, v = heads(4, 0), heads(2, 1), heads(2, 2)
    queries, keys, values = (x.transpose(0, 1) for x in (q, k, v))
    right = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(attend(q, k, v, CAUSAL), right.transpose(0, 1))


def test_what_a_query_meets() -> None:
    window = replace(CAUSAL, window=2)
    assert [key for key in range(6) if window.allows(3, key)] == [2, 3]
    both = replace(window, causal=False)
    assert [key for key in range(6) if both.allows(3, key)] == [2, 3, 4]
    documents = replace(CAUSAL, documents=(0, 2))
    assert [key for key in range(6) if documents.allows(3, key)] == [2, 3]
    assert [key for key in range(6) if CAUSAL.allows(3, key)] == [0, 1, 2, 3]


def test_a_soft_cap_bounds_scores() -> None:
    q, k, v = 100 * heads(1, 0), 100 * heads(1, 1), heads(1, 2)
    capped = attend(q, k, v, replace(CAUSAL, soft_cap=1e-6))
    torch.testing.assert_close(capped[-1, 0], v[:, 0].mean(0), rtol=1e-4, atol=1e-5)


def test_turned_heads_keep_their_length_and_know_distances_only() -> None:
    turns = turns_of(NANO, "layers.0", 6)
    x = heads(1, 0)[:1].expand(6, 1, 4)
    y = turned(x, turns)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    products = y[:, 0] @ y[:, 0].T
    assert float(products[0, 2]) == pytest.approx(float(products[3, 5]), rel=1e-12)
    assert y[0].equal(x[0])


def test_a_block_notes_what_it_makes() -> None:
    model = replace(NANO, qk_norm=True)
    run = sequence_run(model, random_weights(model), [1, 2, 3])
    x_TD = torch.randn(3, 16, dtype=torch.float64)
    assert grouped_attention(run, x_TD).shape == (3, 16)
    assert [part for _, part, _ in run.parts] == [
        *("projection", "norm", "norm", "rotary positions", "rotary positions", "attention"),
    ]
    latent = replace(DEEPSEEK, hidden=16)
    assert latent.latent is not None
    run = sequence_run(latent, random_weights(latent), [1, 2, 3])
    assert latent_attention(run, latent.latent, x_TD).shape == (3, 16)
    assert run.parts["layers.0", "attention", 0].shape == (3, 4 * latent.latent.value_dim)
