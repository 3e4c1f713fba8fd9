"""The table of e4m3, and a product by it."""

from __future__ import annotations

import pytest
import torch

from echelon.core.plan import Precision
from echelon.proof.independent.fp8 import TABLE, TABLE_E5M2, Fp8Rules, fp8_product, nearest_rows


@pytest.mark.system("B09")
def test_the_table_is_pytorchs() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(TABLE, codes.double())
    codes = torch.arange(124, dtype=torch.uint8).view(torch.float8_e5m2)
    assert torch.equal(TABLE_E5M2, codes.double())


def test_a_scale_is_a_power_of_two() -> None:
    x = torch.tensor([[448.0, 1.0], [449.0, 1.0], [3.0, 2.9], [0.0, 0.0]], dtype=torch.float64)
    wanted = [[448.0, 1.0], [448.0, 1.0], [3.0, 3.0], [0.0, 0.0]]
    assert nearest_rows(x, 2).tolist() == wanted


def test_gradients_are_those_of_rounded_numbers() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    y = fp8_product(x, weight, Fp8Rules(block=2), "a", 1.0)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert x.grad is not None
    assert weight.grad is not None
    assert torch.allclose(weight.grad, nearest_rows(dy, 2).T @ nearest_rows(x.detach(), 2))
    # y is what this weight gives, of which x's gradient is the transpose.
    assert torch.allclose(
        (x.grad * nearest_rows(x.detach(), 2)).sum(), (nearest_rows(dy, 2) * y).sum()
    )


def test_rules_are_told_only_where_there_are_8_bit_numbers() -> None:
    assert Fp8Rules.first(Precision(fp8_block=16)) is None
    rules = Fp8Rules.first(Precision(matmul="fp8", fp8_block=16))
    assert rules is not None
    assert rules.block == 16


def test_a_step_rounds_by_the_largest_number_of_the_steps_before() -> None:
    rules = Fp8Rules(block=2, whole=True, history=2)
    x = torch.tensor([[448.0, 17.0]], dtype=torch.float64)
    assert rules.rows(x, "a").tolist() == [[448.0, 16.0]]
    rules = rules.next()
    # What is larger is cut off; what is infinite is no number, and no news.
    assert rules.rows(2 * x, "a").tolist() == [[448.0, 34.0 - 2.0]]
    assert rules.rows(x / 0, "a").isnan().all()
    rules = rules.next()
    assert rules.past == ({"a": 448.0}, {})
    assert rules.rows(x, "b").tolist() == [[448.0, 16.0]]
