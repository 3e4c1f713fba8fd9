"""Where Megatron-core keeps a parameter: in turns, above one another, in either place of a norm."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.model_shape import Experts
from echelon.interop.weight_names.megatron import EMBEDDING_KEY
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


def test_words_may_be_padded_and_experts_have_no_names() -> None:
    naming = find_naming(NANO, {EMBEDDING_KEY})
    assert naming is not None
    source = naming.sources["embedding.weight"]
    assert source.fits((NANO.vocab + 7, NANO.hidden))
    assert not source.fits((NANO.vocab - 1, NANO.hidden))
    experts = replace(NANO, experts=Experts(num_experts=4, top_k=2, ffn=12))
    other = find_naming(experts, {EMBEDDING_KEY})
    assert other is not None
    assert other.nameless
