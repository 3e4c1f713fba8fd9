"""Float64 stays float64 where a module asks for float32, and nothing else changes."""

from __future__ import annotations

import torch

from echelon.proof.verify.reference import StayWide


def test_float64_is_not_narrowed() -> None:
    x = torch.tensor([1.0, 1.0 + 2**-40], dtype=torch.float64)
    assert x.float().dtype is torch.float32
    with StayWide():
        assert torch.equal(x.float(), x)
        assert torch.equal(x.to(torch.float32), x)
        assert torch.softmax(x, 0, dtype=torch.float32).dtype is torch.float64
        assert x.to(torch.bfloat16).dtype is torch.bfloat16
        assert torch.ones(2, dtype=torch.int64).float().dtype is torch.float32
        assert torch.ones(2).double().dtype is torch.float64


def test_grouped_products_of_float64_are_made_one_by_one() -> None:
    torch.manual_seed(0)
    rows = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, 8, 8, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    with StayWide():
        found = torch.nn.functional.grouped_mm(rows, weights, offs=ends)
    right = torch.cat([rows[:2] @ weights[0], rows[2:5] @ weights[2], rows[5:6] @ weights[3]])
    assert torch.equal(found[:6], right)
    assert not found[6:].any()
    found.sum().backward()
    assert weights.grad is not None
    assert not weights.grad[1].any()
    narrow = torch.nn.functional.grouped_mm(
        rows.detach().float()[:6], weights.detach().float(), offs=ends
    )
    torch.testing.assert_close(narrow.double(), right.detach(), rtol=1e-5, atol=1e-6)
