"""The numbers of a model: a ModelShape as the formulas of the lattice read it."""

from __future__ import annotations

from echelon.core.model_shape import ModelShape
from echelon.cost.flops import attention_width
from echelon.cost.lattice.numbers import ModelNumbers, Num, ceil_div


def model_numbers(shape: ModelShape, length: int, *, tp: Num = 1.0) -> ModelNumbers:
    """Return the numbers of a model that reads sequences of `length` tokens.

    The vocabulary is that which `tp` tensor ranks pad it to, an array where `tp` is one.
    """
    latent, experts = shape.latent, shape.experts
    return ModelNumbers(
        layers=float(shape.layers),
        hidden=float(shape.hidden),
        heads=float(shape.heads),
        query_dim=float(shape.query_dim),
        kv_dim=float(shape.kv_dim),
        attention_dim=float(attention_width(shape)),
        ffn=float(shape.ffn),
        up=2.0 if shape.gated else 1.0,
        vocab=ceil_div(float(shape.vocab), tp) * tp,
        tied=float(shape.tied),
        positions=float(shape.max_positions) if shape.positions == "learned" else 0.0,
        length=float(length),
        reach=mean_reach(shape, length),
        norm_weights=2.0 if shape.norm == "layernorm" else 1.0,
        qkv_bias=float(shape.qkv_bias),
        output_bias=float(shape.output_bias),
        mlp_bias=float(shape.mlp_bias),
        head_norms=2.0 * shape.head_dim if shape.qk_norm else 0.0,
        query_rank=float(latent.query_rank) if latent else 0.0,
        kv_rank=float(latent.kv_rank + latent.rope_dim) if latent else 0.0,
        rope_dim=float(latent.rope_dim) if latent else 0.0,
        kv_up_dim=float(shape.heads * (latent.nope_dim + latent.value_dim)) if latent else 0.0,
        value_dim=float(shape.heads * latent.value_dim) if latent else 0.0,
        experts=float(experts.num_experts) if experts else 0.0,
        top_k=float(experts.top_k) if experts else 0.0,
        expert_ffn=float(experts.ffn) if experts else 0.0,
        shared_experts=float(experts.shared_experts) if experts else 0.0,
        dense_layers=float(experts.first_dense_layers) if experts else 0.0,
    )


def mean_reach(shape: ModelShape, length: int) -> float:
    """Return the mean number of keys that a query meets; its own counts half under a causal mask.

    So a causal mask hides exactly half of a sequence, as in `cost/unit_times.py`.
    """
    pairs = shape.mask.num_pairs(length) - shape.causal * length / 2
    return pairs / length
