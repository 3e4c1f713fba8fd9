"""What attention of a block keeps, operator by operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from echelon.core.plan import Context
from echelon.cost.activations.attention import attention_operators, attention_saved
from echelon.cost.activations.from_plan import activation_numbers_from_plan
from echelon.cost.activations.linear import mlp_operators
from echelon.cost.activations.operator_memory import total_saved_bytes
from tests.parallel.layouts import GPT2, QWEN, plan_of


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
