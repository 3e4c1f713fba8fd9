"""The table of e4m3, and a product by it."""

from __future__ import annotations

import torch

from echelon.core.plan import Precision
from echelon.proof.independent.fp8 import TABLE, fp8_block_of, fp8_product, nearest_rows


def test_the_table_is_pytorchs() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(TABLE, codes.double())


def test_a_scale_is_a_power_of_two() -> None:
    x = torch.tensor([[448.0, 1.0], [449.0, 1.0], [3.0, 2.9], [0.0, 0.0]], dtype=torch.float64)
    wanted = [[448.0, 1.0], [448.0, 1.0], [3.0, 3.0], [0.0, 0.0]]
    assert nearest_rows(x, 2).tolist() == wanted


def test_gradients_are_those_of_rounded_numbers() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    y = fp8_product(x, weight, 2)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert x.grad is not None
    assert weight.grad is not None
    assert torch.allclose(weight.grad, nearest_rows(dy, 2).T @ nearest_rows(x.detach(), 2))
    # y is what this weight gives, of which x's gradient is the transpose.
    assert torch.allclose(
        (x.grad * nearest_rows(x.detach(), 2)).sum(), (nearest_rows(dy, 2) * y).sum()
    )


def test_a_block_is_told_only_where_there_are_8_bit_numbers() -> None:
    assert fp8_block_of(Precision(fp8_block=16)) == 0
    assert fp8_block_of(Precision(matmul="fp8", fp8_block=16)) == 16
