"""Float64 stays float64 where a module asks for float32, and nothing else changes."""

from __future__ import annotations

import torch

from echelon.proof.module.wide import StayWide


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
