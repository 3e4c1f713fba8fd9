"""What attention of a block keeps, operator by operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from echelon.core.model_shape import LatentAttention
from echelon.core.plan import Context
from echelon.cost.activations.attention import (
    attention_operators,
    attention_saved,
    latent_operators,
)
from echelon.cost.activations.linear import mlp_operators
from echelon.cost.activations.numbers import activation_numbers_from_plan, total_saved_bytes
from tests.parallel.layouts import GPT2, NANO, QWEN, plan_of


def test_a_block_keeps_what_korthikanti_counts_less_scores_and_dropout() -> None:
    # 34 s b h with 4h: here no mask (1 + 1), no softmax inputs, no second copy of the GELU input.
    model = replace(GPT2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256)
    x = activation_numbers_from_plan(plan_of(model=model, dtype="bf16"))
    kept = sum(total_saved_bytes(one.saved) for one in (*attention_operators(x), *mlp_operators(x)))
    stream, statistics = x.stream, x.tokens * (2 * 2 + x.heads) * 4
    # Two norms' inputs, q k v side by side, output, two linear inputs, and the MLP twice 4 h.
    assert kept == (2 + 3 + 1 + 2 + 8) * stream + statistics


def _saved(**changes: Any) -> dict[str, object]:
    found = attention_saved(activation_numbers_from_plan(plan_of(dtype="fp32", **changes)))
    return {one.name: one.bytes for one in found if one.bytes}


def test_rotated_queries_and_keys_are_kept_beside_the_projections() -> None:
    # 8 tokens, 4 heads and 2 key heads, 4 wide, in four bytes.
    assert _saved() == {
        "residual stream": 8 * 16 * 4,
        "statistics": 8 * 4,
        "attention input": 8 * 16 * 4,
        "queries, keys and values": 8 * (4 + 2 * 2) * 4 * 4,
        "queries": 8 * 4 * 4 * 4,
        "keys": 8 * 2 * 4 * 4,
        "output": 8 * 4 * 4 * 4,
        "log-sum-exp": 8 * 4 * 4,
    }


def test_over_a_ring_the_memory_of_the_projections_may_go() -> None:
    found = _saved(cp=2)
    assert "queries, keys and values" not in found
    assert found["keys and values"] == 2 * 4 * 2 * 4 * 4
    assert found["queries"] == 4 * 4 * 4 * 4


def test_exchanged_heads_are_kept_with_their_copies() -> None:
    found = _saved(cp=4, context=Context(kind="ulysses", ulysses_degree=4))
    # Each of two key heads goes to two members, so that every one has a head.
    assert found["queries, keys and values of own heads"] == 2 * (4 + 2 * 4) * 4 * 4
    assert found["output, position by position"] == 2 * 4 * 4 * 4
    assert not {"queries", "keys", "keys and values"} & found.keys()


def test_norms_of_heads_have_statistics() -> None:
    assert _saved(model=QWEN)["statistics of heads"] == 8 * (4 + 2) * 4


LATENT = LatentAttention(query_rank=6, kv_rank=5, nope_dim=3, rope_dim=2, value_dim=4)
MODEL = replace(NANO, kv_heads=4, head_dim=5, latent=LATENT)
X = activation_numbers_from_plan(plan_of(model=MODEL, dtype="fp32"))


def test_a_block_keeps_narrow_vectors_and_padded_heads() -> None:
    found = {one.name: one.saved_bytes for one in latent_operators(X, LATENT)}
    token = 8 * 4
    assert found["attention norm"] == token * (16 + 1)
    assert found["q_down, kv_down"] == token * (16 + 6 + 5 + 2)
    assert (found["q_norm"], found["kv_norm"]) == (token, token)
    assert (found["q_up"], found["kv_up"]) == (token * 6, token * 5)
    assert found["heads"] == 0
    # The output without the zeros that make values as wide as queries.
    assert found["o"] == token * 4 * 4


def test_values_as_wide_as_queries_are_not_cut_out_of_anything() -> None:
    wide = replace(LATENT, value_dim=5)
    operators = latent_operators(X, wide)
    assert {one.name: one.saved_bytes for one in operators}["o"] == 0
    padded = {one.name: one.saved_bytes for one in latent_operators(X, LATENT)}
    assert {one.name: one.saved_bytes for one in operators}["attention"] == padded["attention"]


def test_b_leaves_for_w_what_each_projection_needs() -> None:
    waits = {one.name: one.weight_gradient_bytes for one in latent_operators(X, LATENT)}
    token = 8 * 4
    assert waits["q_up"] == token * (6 + 4 * 5)
    assert waits["kv_up"] == token * (5 + 4 * (3 + 4))
    assert waits["q_down, kv_down"] == token * (16 + 6 + 5 + 2)
