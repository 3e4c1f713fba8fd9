"""Models as transformers writes them: names, layouts, and what they compute, in a few lines."""

from __future__ import annotations

import torch
from torch.nn import functional as fn

from echelon.core.model_shape import ModelShape

Tensors = dict[str, torch.Tensor]


def noise(*shape: int, seed: int) -> torch.Tensor:
    """Return random weights."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def llama_tensors(shape: ModelShape, prefix: str = "model.") -> Tensors:
    """Return random weights of a Llama, Mistral or Qwen by their names in transformers."""
    sizes: dict[str, tuple[int, ...]] = {
        f"{prefix}embed_tokens.weight": (shape.vocab, shape.hidden)
    }
    for layer in range(shape.layers):
        block = f"{prefix}layers.{layer}"
        sizes[f"{block}.input_layernorm.weight"] = (shape.hidden,)
        sizes[f"{block}.post_attention_layernorm.weight"] = (shape.hidden,)
        for name, out in (("q", shape.query_dim), ("k", shape.kv_dim), ("v", shape.kv_dim)):
            sizes[f"{block}.self_attn.{name}_proj.weight"] = (out, shape.hidden)
            if shape.qkv_bias:
                sizes[f"{block}.self_attn.{name}_proj.bias"] = (out,)
            if shape.qk_norm and name != "v":
                sizes[f"{block}.self_attn.{name}_norm.weight"] = (shape.head_dim,)
        sizes[f"{block}.self_attn.o_proj.weight"] = (shape.hidden, shape.query_dim)
        for name in ("gate", "up"):
            sizes[f"{block}.mlp.{name}_proj.weight"] = (shape.ffn, shape.hidden)
        sizes[f"{block}.mlp.down_proj.weight"] = (shape.hidden, shape.ffn)
    sizes[f"{prefix}norm.weight"] = (shape.hidden,)
    if not shape.tied:
        sizes["lm_head.weight"] = (shape.vocab, shape.hidden)
    return {name: noise(*size, seed=seed) for seed, (name, size) in enumerate(sizes.items())}


def gpt2_tensors(shape: ModelShape, prefix: str = "transformer.") -> Tensors:
    """Return random weights of a GPT-2 by their names in transformers; matrices are [in, out]."""
    hidden, ffn = shape.hidden, shape.ffn
    sizes: dict[str, tuple[int, ...]] = {
        f"{prefix}wte.weight": (shape.vocab, hidden),
        f"{prefix}wpe.weight": (shape.max_positions, hidden),
    }
    for layer in range(shape.layers):
        block = f"{prefix}h.{layer}"
        for name, inner, out in (
            ("attn.c_attn", hidden, 3 * hidden),
            ("attn.c_proj", hidden, hidden),
            ("mlp.c_fc", hidden, ffn),
            ("mlp.c_proj", ffn, hidden),
        ):
            sizes[f"{block}.{name}.weight"] = (inner, out)
            sizes[f"{block}.{name}.bias"] = (out,)
    for norm in (*(f"h.{i}.ln_{n}" for i in range(shape.layers) for n in (1, 2)), "ln_f"):
        sizes[f"{prefix}{norm}.weight"] = sizes[f"{prefix}{norm}.bias"] = (hidden,)
    return {name: noise(*size, seed=seed) for seed, (name, size) in enumerate(sizes.items())}


def attend(q_TD: torch.Tensor, k_TD: torch.Tensor, v_TD: torch.Tensor, heads: int) -> torch.Tensor:
    """Return causal attention of one sequence, [T, D]."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(0, 1) for x in (q_TD, k_TD, v_TD))
    out = fn.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(0, 1).flatten(1)


def gpt2_logits(shape: ModelShape, tensors: Tensors, tokens_T: torch.Tensor) -> torch.Tensor:
    """Return the logits of a GPT-2 for one sequence."""

    def conv1d(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        return fn.layer_norm(x, (shape.hidden,), weight, bias, shape.norm_eps)

    x = tensors["transformer.wte.weight"][tokens_T]
    x = x + tensors["transformer.wpe.weight"][: len(tokens_T)]
    for block in (f"transformer.h.{layer}" for layer in range(shape.layers)):
        q, k, v = conv1d(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").chunk(3, dim=-1)
        x = x + conv1d(attend(q, k, v, shape.heads), f"{block}.attn.c_proj")
        inner = fn.gelu(conv1d(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc"), approximate="tanh")
        x = x + conv1d(inner, f"{block}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ tensors["transformer.wte.weight"].t()


def llama_logits(shape: ModelShape, tensors: Tensors, tokens_T: torch.Tensor) -> torch.Tensor:
    """Return the logits of a Llama, Mistral or Qwen for one sequence."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + shape.norm_eps)
        return x * scale * tensors[f"{name}.weight"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return fn.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def turn(x: torch.Tensor) -> torch.Tensor:
        half = shape.head_dim // 2
        frequency = shape.rope_theta ** (-torch.arange(half) / half)
        angle = torch.outer(torch.arange(len(tokens_T)), frequency).repeat(1, 2)[:, None]
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * angle.cos() + turned * angle.sin()

    x = tensors["model.embed_tokens.weight"][tokens_T]
    for block in (f"model.layers.{layer}" for layer in range(shape.layers)):
        y = norm(x, f"{block}.input_layernorm")
        heads = {name: linear(y, f"{block}.self_attn.{name}_proj") for name in "qkv"}
        q, k, v = (one.unflatten(-1, (-1, shape.head_dim)) for one in heads.values())
        if shape.qk_norm:
            q = norm(q, f"{block}.self_attn.q_norm")
            k = norm(k, f"{block}.self_attn.k_norm")
        groups = shape.heads // shape.kv_heads
        k, v = turn(k).repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mixed = attend(turn(q).flatten(1), k.flatten(1), v.flatten(1), shape.heads)
        x = x + linear(mixed, f"{block}.self_attn.o_proj")
        y = norm(x, f"{block}.post_attention_layernorm")
        inner = fn.silu(linear(y, f"{block}.mlp.gate_proj")) * linear(y, f"{block}.mlp.up_proj")
        x = x + linear(inner, f"{block}.mlp.down_proj")
    head = tensors["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
    return norm(x, "model.norm") @ head.t()
