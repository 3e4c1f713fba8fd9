"""Latent attention and the attention of transformers' DeepSeek-V3, with the same random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from echelon.core.model_shape import LatentAttention as LatentShape
from echelon.core.model_shape import ModelShape
from echelon.models.decoder import MultiHeadLatentAttention
from echelon.models.operations import Operations
from echelon.models.rotary import rotary_tables
from tests.models.batches import blank_batch
from tests.models.latent_shapes import EQUAL_WIDTHS, LATENT

B, T, EPS = 2, 7, 1e-6
SHAPES = [LATENT, EQUAL_WIDTHS]
THEIR_NAMES = {
    "q_down.weight": "q_a_proj.weight",
    "q_norm.weight": "q_a_layernorm.weight",
    "q_up.weight": "q_b_proj.weight",
    "kv_down.weight": "kv_a_proj_with_mqa.weight",
    "kv_norm.weight": "kv_a_layernorm.weight",
    "kv_up.weight": "kv_b_proj.weight",
    "o.weight": "o_proj.weight",
}


def latent_of(shape: ModelShape) -> LatentShape:
    assert shape.latent is not None
    return shape.latent


def theirs(shape: ModelShape, dtype: torch.dtype, attention: str) -> DeepseekV3Attention:
    """Return transformers' attention with random weights."""
    latent = latent_of(shape)
    settings: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rms_norm_eps": EPS,
        "attn_implementation": attention,
    }
    module = DeepseekV3Attention(DeepseekV3Config(**settings), 0)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in module.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn * 0.3 + (parameter.dim() == 1))
    return module.to(dtype)


def as_ours(name: str, tensor: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """Return a weight (or its gradient) with the dims of rotary pairs apart, as ours has them."""
    latent = latent_of(shape)
    if name == "q_up.weight":
        own, turned = tensor.view(shape.heads, shape.head_dim, -1).split(
            (latent.nope_dim, latent.rope_dim), dim=1
        )
        return torch.cat((own, turned[:, 0::2], turned[:, 1::2]), dim=1).flatten(0, 1)
    if name == "kv_down.weight":
        own, turned = tensor.split((latent.kv_rank, latent.rope_dim))
        return torch.cat((own, turned[0::2], turned[1::2]))
    return tensor


def ours(their: DeepseekV3Attention, shape: ModelShape) -> MultiHeadLatentAttention:
    """Return our attention with their weights."""
    values = dict(their.named_parameters())
    dtype = values["o_proj.weight"].dtype
    module = MultiHeadLatentAttention(shape, latent_of(shape), Operations(), 1).to(dtype)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(as_ours(name, values[THEIR_NAMES[name]], shape))
    return module


def shape_of(shape: ModelShape) -> ModelShape:
    """Return a shape with the eps that their two norms have, whatever the configuration says."""
    return replace(shape, norm_eps=EPS)


def compare(their: DeepseekV3Attention, shape: ModelShape, dtype: torch.dtype, tol: float) -> None:
    """Assert that outputs and all gradients are the same but for rounding."""
    our = ours(their, shape)
    generator = torch.Generator().manual_seed(12)
    x_BTD, dy_BTD = (
        torch.randn(B, T, shape.hidden, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(2)
    )
    cos_TE, sin_TE = rotary_tables(shape, torch.arange(T), dtype)
    tables = tuple(one.repeat(1, 2).expand(B, -1, -1) for one in (cos_TE, sin_TE))
    hidden = torch.full((T, T), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]
    their_x, our_x = (x_BTD.clone().requires_grad_() for _ in range(2))
    their_y = their(their_x, tables, hidden)[0]
    their_y.backward(dy_BTD)
    our_y = our(our_x.transpose(0, 1).flatten(0, 1), blank_batch(T, B))
    our_y = our_y.view(T, B, -1).transpose(0, 1)
    our_y.backward(dy_BTD)
    torch.testing.assert_close(our_y, their_y, rtol=tol, atol=tol)
    torch.testing.assert_close(our_x.grad, their_x.grad, rtol=tol, atol=tol)
    gradients = {name: one.grad for name, one in their.named_parameters()}
    for name, parameter in our.named_parameters():
        expected = gradients[THEIR_NAMES[name]]
        assert expected is not None
        assert expected.abs().max() > 0.01
        wanted = as_ours(name, expected, shape)
        torch.testing.assert_close(parameter.grad, wanted, rtol=tol, atol=tol * 10, msg=name)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_float32(shape: ModelShape) -> None:
    compare(theirs(shape, torch.float32, "eager"), shape_of(shape), torch.float32, 1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_float64(shape: ModelShape) -> None:
    their = theirs(shape, torch.float64, "sdpa")
    # Their own norm rounds to float32 on its way.
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        weight = getattr(their, name).weight
        norm = nn.RMSNorm(weight.shape[0], eps=EPS, dtype=torch.float64)
        norm.weight = weight
        setattr(their, name, norm)
    compare(their, shape_of(shape), torch.float64, 1e-10)


def test_rows_in_their_order_give_something_else() -> None:
    their, shape = theirs(LATENT, torch.float64, "sdpa"), shape_of(LATENT)
    our = ours(their, shape)
    x_ND = torch.randn(T * B, shape.hidden, dtype=torch.float64)
    right = our(x_ND, blank_batch(T, B))
    with torch.no_grad():
        our.kv_down.weight.copy_(their.kv_a_proj_with_mqa.weight)
    assert not torch.allclose(our(x_ND, blank_batch(T, B)), right, atol=1e-3)
