"""Where Megatron-core keeps a parameter: in turns, above one another, in either place of a norm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.model_shape import Experts
from echelon.interop.weight_names.megatron import EMBEDDING_KEY, EXPERTS_KEY, ROUTER_BIAS
from echelon.interop.weight_names.names import find_naming
from tests.parallel.layouts import NANO


def test_queries_keys_and_values_lie_by_key_value_head() -> None:
    naming = find_naming(NANO, {EMBEDDING_KEY})
    assert naming is not None
    assert not naming.nameless
    head, queries = NANO.head_dim, NANO.heads // NANO.kv_heads * NANO.head_dim
    q, k, v = (naming.sources[f"layers.0.attention.{part}.weight"] for part in "qkv")
    period = queries + 2 * head
    assert q.shape == (NANO.kv_heads * period, NANO.hidden)
    assert [run.there for run in q.runs(0, NANO.heads * head)] == [
        group * period for group in range(NANO.kv_heads)
    ]
    assert next(k.runs(head, 1)).there == period + queries
    assert next(v.runs(1, 1)).there == queries + head + 1


def test_a_norm_is_by_itself_or_in_the_layer_that_follows() -> None:
    fused = find_naming(NANO, {EMBEDDING_KEY})
    own = find_naming(NANO, {EMBEDDING_KEY, "decoder.layers.0.input_layernorm.weight"})
    assert fused is not None
    assert own is not None
    name = "layers.0.attention_norm.weight"
    expected = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    assert fused.sources[name].key == expected
    assert own.sources[name].key == "decoder.layers.0.input_layernorm.weight"


def test_words_may_be_padded() -> None:
    naming = find_naming(NANO, {EMBEDDING_KEY})
    assert naming is not None
    source = naming.sources["embedding.weight"]
    assert source.fits((NANO.vocab + 7, NANO.hidden))
    assert not source.fits((NANO.vocab - 1, NANO.hidden))


@pytest.mark.parametrize(
    ("keys", "key", "start"),
    [
        ([EXPERTS_KEY], "experts.experts.linear_fc1.weight", 3 * 24 + 12),
        (["experts.linear_fc1.weight3"], "experts.linear_fc1.weight3", 12),
        (["experts.experts.3.linear_fc1.weight"], "experts.experts.3.linear_fc1.weight", 12),
        ([], "experts.local_experts.3.linear_fc1.weight", 12),
    ],
)
def test_experts_are_all_in_one_tensor_or_each_in_its_own(
    keys: list[str], key: str, start: int
) -> None:
    """By the keys that are there: all of a layer, grouped, numbered, one after another."""
    experts = Experts(num_experts=4, top_k=2, ffn=12, shared_experts=2, router_bias=True)
    home = "decoder.layers.0.mlp."
    bias = f"decoder.layers.0{ROUTER_BIAS}"
    there = [one if one.startswith("decoder") else f"{home}{one}" for one in keys]
    naming = find_naming(replace(NANO, experts=experts), {EMBEDDING_KEY, bias, *there})
    assert naming is not None
    assert not naming.nameless
    up = naming.sources["layers.0.mlp.experts.3.up.weight"]
    assert (up.key, up.start) == (f"{home}{key}", start)
    shared = naming.sources["layers.0.mlp.shared.up.weight"]
    assert (shared.key, shared.start) == (f"{home}shared_experts.linear_fc1.weight", 24)
    assert naming.sources["layers.0.mlp.router.bias"].key == bias
    assert naming.sources["layers.0.mlp.router.weight"].key == f"{home}router.weight"
    norm = naming.sources["layers.0.mlp_norm.weight"]
    assert norm.key == "decoder.layers.0.pre_mlp_layernorm.weight"


def test_biases_of_logits_have_no_name_there() -> None:
    """They are no part of a shared expert, over whose rows they would be written."""
    experts = Experts(num_experts=4, top_k=2, ffn=12, shared_experts=1, logit_bias=True)
    naming = find_naming(replace(NANO, experts=experts), {EMBEDDING_KEY})
    assert naming is not None
    assert {*naming.nameless} == {
        f"layers.{block}.mlp.logit_bias.weight" for block in range(NANO.layers)
    }
