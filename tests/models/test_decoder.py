"""One decoder for several shapes: its names, its parts, and its numbers by independent formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters
from echelon.models.batch import IGNORED_LABEL, TokenBatch
from echelon.models.counter_random import initial_values
from echelon.models.decoder import Decoder
from echelon.models.modules import TensorShare
from echelon.models.operations import Operations
from tests.parallel.layouts import GPT2, NANO, QWEN

MISTRAL = replace(NANO, name="mistral", kv_heads=1, ffn=40)
WIDE_HEADS = replace(QWEN, name="qwen3", head_dim=8, qkv_bias=False, tied=False)
PLAIN_MLP = replace(NANO, name="ungated", gated=False, mlp_bias=True)
SHAPES = (NANO, MISTRAL, QWEN, WIDE_HEADS, GPT2, PLAIN_MLP)
B, T = 3, 5


def decoder(shape: ModelShape, scale: float = 10.0) -> Decoder:
    """Return a float64 model with values large enough for every part to matter."""
    model = Decoder(shape).double()
    with torch.no_grad():
        for index, spec in enumerate(parameters(shape)):
            values = initial_values(shape, spec, 0).double() * scale
            noise = torch.randn(spec.shape, generator=torch.Generator().manual_seed(index)) * 0.1
            model.get_parameter(spec.name).copy_(values + noise)
    return model


def batch(shape: ModelShape) -> TokenBatch:
    """Return a batch in which each sequence has another number of counted labels."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(shape.vocab, (B, T + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :3] = IGNORED_LABEL
    labels[2, -1] = IGNORED_LABEL
    return TokenBatch.from_rows(tokens[:, :-1], labels, torch.arange(B))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_names_and_shapes_are_those_of_the_table(shape: ModelShape) -> None:
    own = {name: tuple(p.shape) for name, p in Decoder(shape).named_parameters()}
    assert own == {spec.name: spec.shape for spec in parameters(shape)}


@pytest.mark.parametrize("shape", [NANO, GPT2], ids=lambda shape: shape.name)
def test_a_tensor_rank_has_the_local_shapes(shape: ModelShape) -> None:
    own = {
        name: tuple(p.shape)
        for name, p in Decoder(shape, share=TensorShare(tp=2)).named_parameters()
    }
    assert own == {spec.name: spec.local_shape(2) for spec in parameters(shape)}


def test_stages_hold_their_part_and_the_ends() -> None:
    first = Decoder(QWEN, blocks=(0, 1), last=False)
    last = Decoder(QWEN, blocks=(2, 3), first=False)
    names = [{name for name, _ in part.named_parameters()} for part in (first, last)]
    assert names[0] & names[1] == {"embedding.weight"}
    assert names[0] | names[1] == {spec.name for spec in parameters(QWEN)}
    middle = Decoder(NANO, blocks=(1,), first=False, last=False)
    assert {n.split(".")[1] for n, _ in middle.named_parameters()} == {"1"}


def test_stages_one_after_the_other_are_the_whole() -> None:
    whole, tokens = decoder(GPT2), batch(GPT2)
    parts = [
        Decoder(GPT2, blocks=(0, 1, 2), last=False).double(),
        Decoder(GPT2, blocks=(3,), first=False).double(),
    ]
    x_ND = None
    for part in parts:
        part.load_state_dict({n: whole.get_parameter(n) for n, _ in part.named_parameters()})
        x_ND = part(x_ND, tokens, scale=0.5)
    assert x_ND is not None
    assert float(x_ND.detach()) == pytest.approx(float(whole(None, tokens).detach()) * 0.5)


class Visits(Operations):
    """Note each unit that is entered and left, and double the stream at both."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def enter(self, unit: str, x: torch.Tensor | None) -> torch.Tensor | None:
        self.noted.append(f"+{unit}")
        return None if x is None else x * 2

    def leave(self, unit: str, y: torch.Tensor) -> torch.Tensor:
        self.noted.append(f"-{unit}")
        return y * 2

    def embed(self, *rest: Any) -> torch.Tensor:
        self.noted.append("embed")
        return super().embed(*rest)

    def attend(self, *rest: Any) -> torch.Tensor:
        self.noted.append("attend")
        return super().attend(*rest)

    def head_loss(self, *rest: Any) -> torch.Tensor:
        self.noted.append("loss")
        return super().head_loss(*rest)


def test_every_unit_is_entered_before_its_weights_are_used_and_left_after() -> None:
    parts = [
        Decoder(GPT2, operations=Visits(), blocks=(0, 2), last=False),
        Decoder(GPT2, operations=Visits(), blocks=(3,), first=False, last=False),
        Decoder(GPT2, operations=Visits(), blocks=(), first=False),
    ]
    seen: list[str] = []
    x_ND = None
    for part in parts:
        x_ND = part.float()(x_ND, batch(GPT2))
        assert isinstance(part.operations, Visits)
        seen.append(" ".join(part.operations.noted))
    assert seen == [
        "+embedding embed -embedding +layers.0 attend -layers.0 +layers.2 attend -layers.2",
        "+layers.3 attend -layers.3",
        "+head loss -head",
    ]


def test_what_units_are_given_and_give_is_what_enter_and_leave_return() -> None:
    whole, tokens = decoder(GPT2), batch(GPT2)
    x_ND = torch.ones(B * T, GPT2.hidden, dtype=torch.float64)
    model = Decoder(GPT2, operations=Visits(), blocks=(), first=False).double()
    model.load_state_dict({n: whole.get_parameter(n) for n, _ in model.named_parameters()})
    plain = Decoder(GPT2, blocks=(), first=False).double()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x_ND, tokens), plain(x_ND * 2, tokens) * 2)
    assert torch.equal(Operations().leave("head", x_ND), x_ND)
    inner = Decoder(GPT2, operations=Visits(), blocks=(), last=False).double()
    inner.load_state_dict({n: whole.get_parameter(n) for n, _ in inner.named_parameters()})
    plain = Decoder(GPT2, blocks=(), last=False).double()
    plain.load_state_dict(inner.state_dict())
    assert torch.equal(inner(None, tokens), plain(None, tokens) * 2)


def norm(
    x: torch.Tensor, values: Mapping[str, torch.Tensor], name: str, eps: float
) -> torch.Tensor:
    """Return LayerNorm where there is a bias, else RMSNorm, from their definitions."""
    weight, bias = values[f"{name}.weight"], values.get(f"{name}.bias")
    if bias is None:
        return x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    return centred / (variance + eps).sqrt() * weight + bias


def linear(x: torch.Tensor, values: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return x W^T + b."""
    return x @ values[f"{name}.weight"].T + values.get(f"{name}.bias", 0.0)


def rope(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Return x [B, T, heads, hd] with its half-pairs turned, as complex numbers."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies
    z = (
        torch.complex(x[..., :half], x[..., half:])
        * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    return torch.cat((z.real, z.imag), dim=-1)


def attention(
    x: torch.Tensor, values: Mapping[str, torch.Tensor], name: str, shape: ModelShape
) -> torch.Tensor:
    """Return causal grouped-query attention of x [B, T, D], one head at a time."""
    q, k, v = (
        linear(x, values, f"{name}.{part}").unflatten(-1, (-1, shape.head_dim)) for part in "qkv"
    )
    if shape.qk_norm:
        q = norm(q, values, f"{name}.q_norm", shape.norm_eps)
        k = norm(k, values, f"{name}.k_norm", shape.norm_eps)
    if shape.positions == "rope":
        q, k = rope(q, shape.rope_theta), rope(k, shape.rope_theta)
    out = torch.zeros_like(q)
    for head in range(shape.heads):
        shared = head * shape.kv_heads // shape.heads
        for t in range(x.shape[1]):
            scores = (q[:, t, None, head] * k[:, : t + 1, shared]).sum(-1)
            weights = torch.exp(scores / math.sqrt(shape.head_dim))
            weights = weights / weights.sum(-1, keepdim=True)
            out[:, t, head] = (weights[..., None] * v[:, : t + 1, shared]).sum(1)
    return linear(out.flatten(2), values, f"{name}.o")


def mlp(
    x: torch.Tensor, values: Mapping[str, torch.Tensor], name: str, shape: ModelShape
) -> torch.Tensor:
    """Return SwiGLU, or the activation between two matrices."""
    up = linear(x, values, f"{name}.up")
    if shape.gated:
        gate = linear(x, values, f"{name}.gate")
        return linear(gate / (1 + torch.exp(-gate)) * up, values, f"{name}.down")
    if shape.activation == "gelu":
        cubic = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
        return linear(0.5 * up * (1 + torch.tanh(cubic)), values, f"{name}.down")
    return linear(up / (1 + torch.exp(-up)), values, f"{name}.down")


def by_hand(model: Decoder, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Return the sum of token losses, written apart from the decoder: batch first, by head."""
    shape, values = model.shape, dict(model.named_parameters())
    x = values["embedding.weight"][tokens_BT]
    if shape.positions == "learned":
        x = x + values["positions.weight"][: tokens_BT.shape[1]]
    for layer in range(shape.layers):
        name = f"layers.{layer}"
        y = norm(x, values, f"{name}.attention_norm", shape.norm_eps)
        x = x + attention(y, values, f"{name}.attention", shape)
        y = norm(x, values, f"{name}.mlp_norm", shape.norm_eps)
        x = x + mlp(y, values, f"{name}.mlp", shape)
    x = norm(x, values, "norm", shape.norm_eps)
    logits = x @ values["embedding.weight" if shape.tied else "head.weight"].T
    losses = (
        torch.logsumexp(logits, -1) - logits.gather(-1, labels_BT.clamp(min=0)[..., None])[..., 0]
    )
    return losses[labels_BT != IGNORED_LABEL].sum()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_loss_and_gradients_equal_the_formulas(shape: ModelShape) -> None:
    model, tokens = decoder(shape), batch(shape)
    rows = (tokens.tokens_N.view(T, B).t(), tokens.labels_N.view(T, B).t())
    loss = model(None, tokens)
    loss.backward()
    got = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    expected = by_hand(model, *rows)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-9, atol=1e-11, msg=name)


def test_untrained_models_know_nothing() -> None:
    model, tokens = decoder(NANO, scale=0.0), batch(NANO)
    with torch.no_grad():
        model.head.weight.zero_()
        assert float(model(None, tokens)) == pytest.approx(tokens.num_valid() * math.log(37))


def test_rows_become_a_sequence_first_batch() -> None:
    tokens = torch.arange(6).view(2, 3)
    one = TokenBatch.from_rows(tokens, tokens + 1, torch.tensor([8, 9]), step=4, train=False)
    assert one.tokens_N.tolist() == [0, 3, 1, 4, 2, 5]
    assert one.labels_N.tolist() == [1, 4, 2, 5, 3, 6]
    assert (one.num_sequences, one.num_positions, one.num_valid()) == (2, 3, 6)
    assert (one.step, one.train) == (4, False)


def test_ignored_labels_are_not_counted() -> None:
    assert batch(NANO).num_valid() == B * T - 4
