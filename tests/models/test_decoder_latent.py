"""Latent attention against its formulas, one head at a time; its names; what its key is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters
from echelon.models.batch import TokenBatch
from echelon.models.decoder import Decoder, MultiHeadLatentAttention
from echelon.models.operations import Operations
from tests.models.batches import blank_batch
from tests.models.latent_shapes import EQUAL_WIDTHS, LATENT
from tests.parallel.layouts import NANO

B, T = 3, 5
SHAPES = (
    LATENT,
    EQUAL_WIDTHS,
    replace(LATENT, name="window", window=2),
    replace(LATENT, name="full mask", causal=False),
)
Values = Mapping[str, torch.Tensor]


def attention_of(
    shape: ModelShape, operations: Operations | None = None
) -> MultiHeadLatentAttention:
    """Return the attention of a block with random float64 weights."""
    assert shape.latent is not None
    module = MultiHeadLatentAttention(shape, shape.latent, operations or Operations(), 1).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            drawn = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            parameter.copy_(drawn * 0.4 + (parameter.dim() == 1))
    return module


def stream(shape: ModelShape, seed: int) -> torch.Tensor:
    """Return random rows, sequence first."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(T * B, shape.hidden, dtype=torch.float64, generator=generator)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Return x [..., P] with its half-pairs turned, as complex numbers."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), dim=-1)


def sees(shape: ModelShape, query: int, key: int) -> bool:
    """Return whether a position meets another one."""
    near = shape.window is None or abs(query - key) < shape.window
    return near and (key <= query or not shape.causal)


def by_hand(x_ND: torch.Tensor, values: Values, shape: ModelShape) -> torch.Tensor:
    """Return DeepSeek-V2's equations 9 to 19, head by head and position by position."""
    latent = shape.latent
    assert latent is not None
    x = x_ND.view(T, B, -1)
    c_q = rms_norm(x @ values["q_down.weight"].T, values["q_norm.weight"], shape.norm_eps)
    down = x @ values["kv_down.weight"].T
    c_kv = rms_norm(down[..., : latent.kv_rank], values["kv_norm.weight"], shape.norm_eps)
    k_shared = down[..., latent.kv_rank :]
    q_rows = values["q_up.weight"].view(shape.heads, shape.head_dim, -1)
    kv_rows = values["kv_up.weight"].view(shape.heads, latent.nope_dim + latent.value_dim, -1)
    outs: list[torch.Tensor] = []
    for head in range(shape.heads):
        q, kv = c_q @ q_rows[head].T, c_kv @ kv_rows[head].T
        k_own, v = kv[..., : latent.nope_dim], kv[..., latent.nope_dim :]
        rows: list[torch.Tensor] = []
        for t in range(T):
            keys = [s for s in range(T) if sees(shape, t, s)]
            q_turned = turned(q[t, :, latent.nope_dim :], t, shape.rope_theta)
            scores = torch.stack(
                [
                    (q[t, :, : latent.nope_dim] * k_own[s]).sum(-1)
                    + (q_turned * turned(k_shared[s], s, shape.rope_theta)).sum(-1)
                    for s in keys
                ]
            )
            weights = (scores / math.sqrt(latent.nope_dim + latent.rope_dim)).exp()
            weights = weights / weights.sum(0)
            rows.append((weights[..., None] * v[keys]).sum(0))
        outs.append(torch.stack(rows))
    return torch.cat(outs, dim=-1).view(T * B, -1) @ values["o.weight"].T


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_output_and_gradients_equal_the_formulas(shape: ModelShape) -> None:
    module, x_ND, batch = attention_of(shape), stream(shape, 1).requires_grad_(), blank_batch(T, B)
    wanted = [x_ND, *module.parameters()]
    y_ND = module(x_ND, batch)
    got = torch.autograd.grad(y_ND, wanted, stream(shape, 2))
    hand_ND = by_hand(x_ND, dict(module.named_parameters()), shape)
    expected = torch.autograd.grad(hand_ND, wanted, stream(shape, 2))
    torch.testing.assert_close(y_ND, hand_ND, rtol=1e-12, atol=1e-12)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [LATENT, EQUAL_WIDTHS], ids=lambda shape: shape.name)
def test_names_and_shapes_are_those_of_the_table(shape: ModelShape) -> None:
    own = {name: tuple(p.shape) for name, p in Decoder(shape).named_parameters()}
    assert own == {spec.name: spec.shape for spec in parameters(shape)}


@pytest.mark.parametrize("tp", [2, 4])
def test_a_tensor_rank_has_the_local_shapes(tp: int) -> None:
    assert LATENT.latent is not None
    module = MultiHeadLatentAttention(LATENT, LATENT.latent, Operations(), tp)
    own = {f"layers.0.attention.{n}": tuple(p.shape) for n, p in module.named_parameters()}
    specs = {spec.name: spec for spec in parameters(LATENT)}
    assert own == {name: specs[name].local_shape(tp) for name in own}
    assert len(own) == sum(name.startswith("layers.0.attention.") for name in specs)


class Met(Operations):
    """Keep what attention was given."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shape: ModelShape,
        batch: TokenBatch,
    ) -> torch.Tensor:
        self.q, self.k, self.v = q, k, v
        return super().attend(q, k, v, shape, batch)


def test_keys_of_all_heads_end_alike_and_only_that_part_turns() -> None:
    ops, latent = Met(), LATENT.latent
    assert latent is not None
    rows = stream(LATENT, 3)[:B].repeat(T, 1)
    attention_of(LATENT, ops)(rows, blank_batch(T, B))
    own, shared = ops.k.split((latent.nope_dim, latent.rope_dim), dim=-1)
    assert torch.equal(shared, shared[:, :, :1].expand_as(shared))
    assert not torch.equal(own[:, :, 0], own[:, :, 1])
    # The same token at every position: what does not turn is the same there.
    torch.testing.assert_close(own, own[:1].expand_as(own))
    assert all(not torch.allclose(shared[0], shared[t]) for t in range(1, T))


def test_values_are_as_wide_as_keys_with_zeros_behind_them() -> None:
    ops = Met()
    attention_of(LATENT, ops)(stream(LATENT, 3), blank_batch(T, B))
    assert ops.q.shape == ops.k.shape == ops.v.shape == (T, B, 4, 10)
    assert not ops.v[..., 7:].any()
    assert ops.v[..., :7].all()


def test_other_models_have_no_narrow_vectors() -> None:
    assert not any("_down" in name for name, _ in Decoder(NANO).named_parameters())
