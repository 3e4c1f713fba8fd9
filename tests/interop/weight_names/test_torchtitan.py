"""Where torchtitan keeps a parameter: before 0.3 and since, with pairs of neighbours or halves."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.model_shape import Experts
from echelon.interop.weight_names.names import find_naming
from echelon.interop.weight_names.torchtitan import EMBEDDING_KEY, EXPERTS_KEY, ROUTER_BIAS
from tests.parallel.layouts import NANO

NAME = "layers.0.attention.q.weight"


def test_older_names_are_known_by_the_keys() -> None:
    newer = find_naming(NANO, {EMBEDDING_KEY, "layers.0.attention.qkv_linear.wq.weight"})
    older = find_naming(NANO, {EMBEDDING_KEY, "output.weight"})
    assert newer is not None
    assert older is not None
    assert newer.sources[NAME].key == "layers.0.attention.qkv_linear.wq.weight"
    assert older.sources[NAME].key == "layers.0.attention.wq.weight"
    assert newer.sources["head.weight"].key == "lm_head.weight"
    assert older.sources["head.weight"].key == "output.weight"


def test_llama_turns_neighbours_and_qwen_halves() -> None:
    llama = find_naming(NANO, {EMBEDDING_KEY})
    qwen = find_naming(replace(NANO, qk_norm=True), {EMBEDDING_KEY})
    assert llama is not None
    assert qwen is not None
    assert [run.there for run in llama.sources[NAME].runs(0, NANO.head_dim)] == [0, 1]
    assert [run.step for run in qwen.sources[NAME].runs(0, NANO.head_dim)] == [1]


def test_experts_of_a_block_are_stacked() -> None:
    """Since 0.3 in a room of their own; a first block without experts is as ever."""
    experts = Experts(
        num_experts=4, top_k=2, ffn=12, shared_experts=2, first_dense_layers=1, router_bias=True
    )
    shape = replace(NANO, experts=experts)
    newer = find_naming(shape, {EMBEDDING_KEY, f"layers.1{ROUTER_BIAS}"})
    older = find_naming(
        shape, {EMBEDDING_KEY, "layers.1.moe.experts.w3", "layers.1.moe.expert_bias"}
    )
    assert newer is not None
    assert older is not None
    assert not newer.nameless
    assert EXPERTS_KEY.endswith("moe.routed_experts.inner_experts.w1_EFD")
    up = newer.sources["layers.1.mlp.experts.3.up.weight"]
    assert up.key == "layers.1.moe.routed_experts.inner_experts.w3_EFD"
    assert (up.shape, up.start) == ((4, 12, NANO.hidden), 36)
    assert newer.sources["layers.1.mlp.router.bias"].key == "layers.1.moe.expert_bias_E"
    assert newer.sources["layers.0.mlp.up.weight"].key == "layers.0.feed_forward.w3.weight"
    shared = newer.sources["layers.1.mlp.shared.down.weight"]
    assert shared.key == "layers.1.moe.shared_experts.w2.weight"
    assert older.sources["layers.1.mlp.experts.3.up.weight"].key == "layers.1.moe.experts.w3"
    assert older.sources["layers.1.mlp.router.bias"].key == "layers.1.moe.expert_bias"
