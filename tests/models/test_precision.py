"""bf16 and fp16 in the reference: fp32 where digits would be lost, narrow between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.models.decoder import Decoder
from echelon.models.operations import Operations, dropout_mask
from echelon.models.precision import at_least_fp32, widened
from tests.models.batches import blank_batch
from tests.models.test_decoder import batch, decoder
from tests.parallel.layouts import GPT2, NANO, QWEN

NARROW = {"bf16": (torch.bfloat16, 2.0**-8), "fp16": (torch.float16, 2.0**-11)}
PLAIN = Operations()


def test_only_what_is_narrower_than_fp32_is_widened() -> None:
    assert at_least_fp32(torch.bfloat16) == at_least_fp32(torch.float16) == torch.float32
    for dtype in (torch.float32, torch.float64):
        x = torch.zeros(2, dtype=dtype)
        assert at_least_fp32(dtype) == dtype
        assert widened(x) is x


class Watched(Operations):
    """Note the dtypes of what goes between steps."""

    def __init__(self) -> None:
        self.streams: set[torch.dtype] = set()
        self.tables: set[torch.dtype] = set()

    def leave(self, unit: str, y: torch.Tensor) -> torch.Tensor:
        if unit != "head":
            self.streams.add(y.dtype)
        return y

    def project_in(self, x_ND: torch.Tensor, linears: Any) -> torch.Tensor:
        self.streams.add(x_ND.dtype)
        return super().project_in(x_ND, linears)

    def project_out(self, x: torch.Tensor, linear: Any) -> torch.Tensor:
        self.streams.add(x.dtype)
        return super().project_out(x, linear)

    def rotate(self, x: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
        self.tables |= {cos_TE.dtype, sin_TE.dtype}
        return super().rotate(x, cos_TE, sin_TE)


@pytest.mark.parametrize("shape", [QWEN, replace(GPT2, dropout=0.2)], ids=lambda one: one.name)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_activations_have_the_dtype_of_the_parameters_the_loss_at_least_fp32(
    shape: Any, dtype: torch.dtype
) -> None:
    watched = Watched()
    model = Decoder(shape, operations=watched)
    model.load_state_dict(decoder(shape, scale=1.0).state_dict())
    model.to(dtype)
    loss = model(None, batch(shape), scale=0.5)
    loss.backward()
    assert watched.streams == {dtype}
    assert watched.tables <= {at_least_fp32(dtype)}
    assert loss.dtype == at_least_fp32(dtype)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == dtype
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize(("dtype", "roundoff"), NARROW.values(), ids=NARROW)
def test_a_norm_and_a_rotation_are_rounded_once(dtype: torch.dtype, roundoff: float) -> None:
    x = torch.randn(40, 2, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.nn.Parameter((torch.ones(16) * 1.1).to(dtype))
    bias = torch.nn.Parameter(torch.ones(16).to(dtype))
    cos, sin = PLAIN.rotary_tables(replace(NANO, head_dim=16), blank_batch(40, 2), x)
    computed = (
        (PLAIN.norm(x, weight, None, 1e-5), rms(x.double()) * weight.double()),
        (PLAIN.norm(x, weight, bias, 1e-5), standard(x.double()) * weight.double() + 1),
        (PLAIN.rotate(x, cos, sin), PLAIN.rotate(x.double(), cos.double(), sin.double())),
    )
    for got, exact in computed:
        assert got.dtype == dtype
        assert rounded_once(got, exact, roundoff)


def rounded_once(got: torch.Tensor, exact: torch.Tensor, roundoff: float) -> bool:
    """Return whether each element is off by one rounding, beside those of float32."""
    return bool(((got.double() - exact).abs() <= roundoff * exact.abs() + 1e-6).all())


def rms(x: torch.Tensor) -> torch.Tensor:
    """Return x over its root mean square."""
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def standard(x: torch.Tensor) -> torch.Tensor:
    """Return x with mean 0 and variance 1."""
    x = x - x.mean(-1, keepdim=True)
    return rms(x)


def test_scores_beyond_fp16_still_have_a_softmax() -> None:
    q, k, v = (
        torch.randn(9, 2, 4, 16, generator=torch.Generator().manual_seed(s)) for s in range(3)
    )
    q, k, v = (q * 500).half(), (k * 500).half(), v.half()
    batch = blank_batch(9, 2)
    got = PLAIN.attend(q, k, v, NANO, batch).view(q.shape)
    exact = PLAIN.attend(q.double(), k.double(), v.double(), NANO, batch).view(q.shape)
    assert torch.einsum("tbhd,sbhd->bhts", q, k).isinf().any()
    torch.testing.assert_close(got.double(), exact, rtol=0.0, atol=2e-3)


def test_logits_are_ready_for_a_softmax() -> None:
    x_ND = torch.randn(3, 8).bfloat16()
    head = torch.nn.Parameter(torch.randn(5, 8).bfloat16())
    assert PLAIN.logits(x_ND, head).dtype == torch.float32
    assert PLAIN.logits(x_ND.double(), torch.nn.Parameter(head.double())).dtype == torch.float64


@pytest.mark.parametrize(("dtype", "roundoff"), NARROW.values(), ids=NARROW)
def test_dropout_scales_by_the_exact_factor(dtype: torch.dtype, roundoff: float) -> None:
    x_ND = torch.randn(64, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    tokens = blank_batch(16, 4)
    got = PLAIN.dropout(x_ND, 0.1, "layers.0.mlp", tokens)
    mask = dropout_mask(torch.arange(64), x_ND.double(), 0.1, "layers.0.mlp", tokens)
    exact = x_ND.double() * mask
    assert got.dtype == dtype
    assert torch.equal(got == 0, exact == 0)
    assert rounded_once(got, exact, roundoff)
