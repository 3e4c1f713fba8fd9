"""The oracle's 8-bit numbers beside a table of all codes; ties, and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.core.plan import Precision
from echelon.models.decoder import Decoder
from echelon.models.modules import EmptyLinear
from echelon.models.precision import E4M3
from echelon.parallel.kernels.fp8 import rounded_to_fp8 as codes_of
from echelon.proof.independent.fp8 import TABLE, nearest_rows, nearest_squares
from echelon.proof.oracle.fp8 import Fp8Rounding, multiply_in_fp8, rounded_to_fp8
from tests.parallel.layouts import NANO

FP8 = Precision(parameters="fp64", matmul="fp8", fp8_block=4)


def numbers(rows: int, columns: int) -> torch.Tensor:
    """Return numbers of many sizes, with zeros and whole tiles of zeros among them."""
    size = torch.exp2(40 * torch.rand(rows, columns, dtype=torch.float64) - 20)
    x = size * torch.randn(rows, columns, dtype=torch.float64)
    x[0] = 0.0
    x[1, ::3] = 0.0
    return x


@pytest.mark.system("B09")
@pytest.mark.parametrize("square", [False, True])
def test_it_is_the_nearest_entry_of_the_table(square: bool) -> None:
    x = numbers(16, 32)
    wanted = nearest_squares(x, 4) if square else nearest_rows(x, 4)
    assert torch.equal(rounded_to_fp8(x, 4, square=square), wanted)


@pytest.mark.parametrize("noise", [0.0, 1e-13, -1e-13])
def test_numbers_between_two_of_the_table_go_to_the_even_one(noise: float) -> None:
    """Whatever order of float64 sums led to the middle, all three implementations agree."""
    middle = ((TABLE[:-1] + TABLE[1:]) / 2)[:, None]
    # A number above 224 is in each tile, and none above 448, so that scales are 1.
    x = torch.cat((middle * (1 + noise), torch.full_like(middle, 288.0)), dim=1)
    below = torch.arange(126)
    even = TABLE[below + below % 2]
    assert torch.equal(rounded_to_fp8(x, 2)[:, 0], even)
    assert torch.equal(rounded_to_fp8(-x, 2)[:, 0], -even)
    assert torch.equal(nearest_rows(x, 2)[:, 0], even)
    assert torch.equal(codes_of(x[:, 0], E4M3).double(), even)


def test_backward_rounds_the_gradient_as_if_the_loss_were_not_multiplied() -> None:
    model = Decoder(replace(NANO, layers=1)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    (up,) = (one for name, one in model.named_modules() if name.endswith("mlp.up"))
    assert isinstance(up, EmptyLinear)
    x, dy = (torch.randn(3, n, dtype=torch.float64) for n in (16, 24))
    for factor in (1.0, 2 ** (3 / 8)):
        multiply_in_fp8(model, dict(model.named_parameters()), FP8, Fp8Rounding(factor=factor))
        x.requires_grad_().grad, up.weight.grad = None, None
        up(x).backward(factor * dy)
        rounded = factor * rounded_to_fp8(dy, 4)
        weight = rounded_to_fp8(up.weight.detach(), 4, square=True)
        assert x.grad is not None
        assert up.weight.grad is not None
        torch.testing.assert_close(x.grad, rounded @ weight, rtol=1e-13, atol=1e-13)
        right = rounded.T @ rounded_to_fp8(x.detach(), 4)
        torch.testing.assert_close(up.weight.grad, right, rtol=1e-13, atol=1e-13)


def test_without_8_bit_numbers_layers_are_as_they_were() -> None:
    model = Decoder(replace(NANO, layers=1))
    multiply_in_fp8(model, {}, Precision(), Fp8Rounding())
    assert not any("forward" in vars(one) for one in model.modules())
