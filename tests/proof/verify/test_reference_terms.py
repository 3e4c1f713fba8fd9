"""A loss that is a sum has the gradient of each of its terms; one that is none has no terms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon.proof.verify.case import OneDevice
from echelon.proof.verify.reference import _step
from echelon.proof.verify.watch import PassingWatch

LOSSES = {
    "sum": (lambda a, b: a + b, [1.0, 1.0]),
    "weighted": (lambda a, b: (a + 3 * b) / 2, [0.5, 1.5]),
    "difference": (lambda a, b: a - b, [1.0, -1.0]),
    "stacked": (lambda a, b: torch.stack([a, b]).sum() + 1, [1.0, 1.0]),
    "product": (lambda a, b: a * b, []),
    "twice the same": (lambda a, b: a + a, []),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_terms_add_up_to_the_gradient(kind: str) -> None:
    made, weights = LOSSES[kind]
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x = torch.randn(5, 3, dtype=torch.float64)

    def two() -> tuple[torch.Tensor, torch.Tensor]:
        y = model(x)
        return y.square().mean(), y.exp().mean()

    one_device = OneDevice(
        model=model,
        loss=lambda _: made(*two()),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
    )
    names = dict(model.named_parameters())
    watch = PassingWatch([], lambda: 0)
    step = _step(one_device, names, 0, 1.0, watch)
    assert len(step.terms) == len(weights)
    for name, gradient in step.gradients.items():
        if weights:
            torch.testing.assert_close(sum(term[name] for term in step.terms), gradient)
        for weight, term, loss in zip(weights, step.terms, two(), strict=False):
            (right,) = torch.autograd.grad(loss, names[name], retain_graph=True)
            torch.testing.assert_close(term[name], weight * right)
