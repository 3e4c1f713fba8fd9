"""Layouts of trainers: rows of a head in pairs, groups of heads, all layers in one tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.model_shape import Experts, ModelShape
from echelon.proof.independent.layouts import LAYOUTS
from echelon.proof.independent.weights import weights_of
from tests.proof.layouts import layout

MODEL = layout(model={"layers": 2, "qk_norm": True}).model
PLAIN = replace(MODEL, qk_norm=False)


def numbered(*shape: int) -> torch.Tensor:
    """Return a tensor whose elements are all different."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def torchtitan(model: ModelShape) -> dict[str, torch.Tensor]:
    wide, ffn = model.hidden, model.ffn
    block = {
        "attention_norm": (wide,),
        "attention.qkv_linear.wq": (model.heads * model.head_dim, wide),
        "attention.qkv_linear.wk": (model.kv_heads * model.head_dim, wide),
        "attention.qkv_linear.wv": (model.kv_heads * model.head_dim, wide),
        "attention.wo": (wide, model.heads * model.head_dim),
        "ffn_norm": (wide,),
        "feed_forward.w1": (ffn, wide),
        "feed_forward.w3": (ffn, wide),
        "feed_forward.w2": (wide, ffn),
    }
    if model.qk_norm:
        block |= dict.fromkeys(("attention.q_norm", "attention.k_norm"), (model.head_dim,))
    ends = {"tok_embeddings": (model.vocab, wide), "norm": (wide,), "lm_head": (model.vocab, wide)}
    named: dict[str, tuple[int, ...]] = {
        f"layers.{n}.{name}": shape for n in range(model.layers) for name, shape in block.items()
    }
    return {f"{name}.weight": numbered(*shape) for name, shape in {**named, **ends}.items()}


def megatron(model: ModelShape) -> dict[str, torch.Tensor]:
    wide, rows = model.hidden, (model.heads + 2 * model.kv_heads) * model.head_dim
    block = {
        "self_attention.linear_qkv.layer_norm_weight": (wide,),
        "self_attention.linear_qkv.weight": (rows, wide),
        "self_attention.linear_proj.weight": (wide, model.heads * model.head_dim),
        "self_attention.q_layernorm.weight": (model.head_dim,),
        "self_attention.k_layernorm.weight": (model.head_dim,),
        "mlp.linear_fc1.layer_norm_weight": (wide,),
        "mlp.linear_fc1.weight": (2 * model.ffn, wide),
        "mlp.linear_fc2.weight": (wide, model.ffn),
    }
    ends = {
        "embedding.word_embeddings.weight": (model.vocab + 3, wide),
        "decoder.final_layernorm.weight": (wide,),
        "output_layer.weight": (model.vocab + 3, wide),
    }
    stacked = {f"decoder.layers.{name}": (model.layers, *shape) for name, shape in block.items()}
    return {name: numbered(*shape) for name, shape in {**stacked, **ends}.items()}


@pytest.mark.parametrize(
    ("to", "tensors", "model"),
    [("dcp", torchtitan, MODEL), ("dcp", torchtitan, PLAIN), ("megatron", megatron, MODEL)],
)
def test_every_weight_of_the_model_is_read(to: str, tensors: Any, model: ModelShape) -> None:
    assert LAYOUTS[to].has(model)
    result = LAYOUTS[to].weights(model, tensors(model))
    right = {name: fact.shape for name, fact in weights_of(model).items()}
    assert {name: tuple(value.shape) for name, value in result.items()} == right
    tied = LAYOUTS[to].weights(replace(model, tied=True), tensors(model))
    assert result.keys() - tied.keys() == {"head.weight"}


def test_torchtitan_has_pairs_of_a_head_side_by_side() -> None:
    tensors = torchtitan(PLAIN)
    stored = tensors["layers.1.attention.qkv_linear.wq.weight"]
    query = LAYOUTS["dcp"].weights(PLAIN, tensors)["layers.1.attention.q.weight"]
    half = PLAIN.head_dim // 2
    assert torch.equal(query[1], stored[2])
    assert torch.equal(query[half], stored[1])
    assert torch.equal(query[PLAIN.head_dim + half + 1], stored[PLAIN.head_dim + 3])


def test_megatron_has_queries_of_a_group_before_its_key_and_value() -> None:
    tensors = megatron(MODEL)
    stored = tensors["decoder.layers.self_attention.linear_qkv.weight"][1]
    result = LAYOUTS["megatron"].weights(MODEL, tensors)
    group, head = MODEL.heads // MODEL.kv_heads, MODEL.head_dim
    second = (group + 2) * head
    assert torch.equal(result["layers.1.attention.q.weight"][group * head], stored[second])
    assert torch.equal(result["layers.1.attention.k.weight"][0], stored[group * head])
    assert torch.equal(
        result["layers.1.attention.v.weight"][head], stored[second + group * head + head]
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"experts": Experts(num_experts=4, top_k=2, ffn=12)},
        {"qkv_bias": True},
        {"norm": "layernorm"},
        {"gated": False},
        {"residual": "parallel"},
    ],
)
def test_other_models_are_not_read(changes: dict[str, Any]) -> None:
    assert not any(layout.has(replace(MODEL, **changes)) for layout in LAYOUTS.values())
