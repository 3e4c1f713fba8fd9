"""What latent attention keeps, by hand."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.model_shape import LatentAttention
from echelon.cost.activations.from_plan import activation_numbers_from_plan
from echelon.cost.activations.latent import latent_operators
from tests.parallel.layouts import NANO, plan_of

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
