"""Model FLOPs per token, beside figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.model_shape import Experts, LatentAttention, ModelShape
from echelon.cost.seconds.kernels import causal_positions, model_flops_per_token

SHAPE = ModelShape(
    name="x",
    layers=2,
    hidden=8,
    heads=2,
    kv_heads=1,
    head_dim=4,
    ffn=16,
    vocab=32,
    max_positions=64,
)
ATTENTION = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8
MLP = 3 * 8 * 16
NORMS = 2 * 8
WEIGHTS = 2 * (ATTENTION + MLP + NORMS) + 8 + 32 * 8


def test_a_dense_model() -> None:
    assert model_flops_per_token(SHAPE, 64) == 6 * WEIGHTS + 12 * 2 * 8 * 64


def test_a_tied_head_multiplies_as_much_as_an_untied_one() -> None:
    tied = replace(SHAPE, tied=True)
    assert model_flops_per_token(tied, 64) == model_flops_per_token(SHAPE, 64)


def test_learned_positions_are_looked_up() -> None:
    learned = replace(SHAPE, positions="learned")
    assert model_flops_per_token(learned, 64) == model_flops_per_token(SHAPE, 64)


def test_only_the_experts_that_a_token_meets_count() -> None:
    few = replace(SHAPE, experts=Experts(num_experts=4, top_k=2, ffn=16))
    more = replace(SHAPE, experts=Experts(num_experts=8, top_k=2, ffn=16))
    routers = 6 * 2 * (8 - 4) * 8
    assert model_flops_per_token(more, 64) - model_flops_per_token(few, 64) == routers


def test_latent_attention_has_two_widths() -> None:
    latent = LatentAttention(query_rank=4, kv_rank=4, nope_dim=4, rope_dim=2, value_dim=4)
    shape = replace(SHAPE, latent=latent)
    longer = model_flops_per_token(shape, 65) - model_flops_per_token(shape, 64)
    assert longer == 12 * 2 * 2 * (4 + 2 + 4) / 2


def test_of_a_window_only_what_is_inside_counts() -> None:
    reach = [16, 64, 64, 31]
    shapes = [
        replace(SHAPE, window=16),
        replace(SHAPE, window=100),
        replace(SHAPE, causal=False),
        replace(SHAPE, window=16, causal=False),
    ]
    for shape, positions in zip(shapes, reach, strict=True):
        assert model_flops_per_token(shape, 64) == 6 * WEIGHTS + 12 * 2 * 8 * positions


def test_causal_flops_are_those_of_the_pairs_that_a_mask_shows() -> None:
    for window in (None, 5, 64, 100):
        shape = replace(SHAPE, window=window)
        reach = 64 if window is None else window
        pairs = sum(min(query + 1, reach) for query in range(64))
        assert causal_positions(shape, 64) == pairs / 64
        causal = model_flops_per_token(shape, 64, causal=True)
        assert causal == 6 * WEIGHTS + 12 * 2 * 8 * pairs / 64
    both = replace(SHAPE, causal=False)
    assert model_flops_per_token(both, 64, causal=True) == model_flops_per_token(both, 64)
