"""The gradients of sinks, of some heads of a tensor rank."""

from __future__ import annotations

import torch
from torch import nn

from echelon.models.attention.sinks import HeadSinks


def test_heads_elsewhere_get_no_gradient_from_here() -> None:
    generator = torch.Generator().manual_seed(2)
    out, dout = (torch.randn(5, 2, 2, 3, generator=generator).double() for _ in range(2))
    lse = torch.randn(2, 2, 5, generator=generator).double()
    weight = nn.Parameter(torch.tensor([9.0, -1.0, 0.5, 9.0], dtype=torch.float64))
    found: list[torch.Tensor] = []
    sinks = HeadSinks(weight=weight, add=lambda _, one: found.append(one), heads=slice(1, 3))
    assert torch.equal(sinks.values_H, weight[1:3])
    sinks.backward(dout, out, lse)
    shares = (weight.detach()[None, 1:3, None] - lse).exp()
    pull = (dout * out).sum(-1).permute(1, 2, 0)
    wanted = -(shares * pull).sum((0, 2))
    torch.testing.assert_close(found[0], torch.tensor([0.0, *wanted.tolist(), 0.0]).double())
