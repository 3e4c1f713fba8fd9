"""Merged weights, and gradients of adapters by the chain rule, beside autograd."""

from __future__ import annotations

from dataclasses import replace

import torch

from echelon.core.choices.lora import Lora
from echelon.core.parameters import parameters
from echelon.proof.independent.hugging_face.beside import adapter_gradients, merged
from tests.parallel.layouts import NANO

SHAPE = replace(NANO, lora=Lora(rank=2, alpha=6.0, targets=("v", "up")))


def test_gradients_of_adapters_are_those_of_autograd() -> None:
    generator = torch.Generator().manual_seed(1)
    values = {
        spec.name: torch.randn(spec.shape, generator=generator, dtype=torch.float64)
        for spec in parameters(SHAPE)
    }
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    whole = merged(SHAPE, leaves)
    assert not any("lora" in name for name in whole)
    weights = {name: torch.randn(one.shape, generator=generator) for name, one in whole.items()}
    torch.stack([(whole[name] * weights[name]).sum() for name in whole]).sum().backward()
    found = adapter_gradients(SHAPE, values, weights)
    assert found.keys() == {name for name in values if "lora" in name}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, leaves[name].grad)
