# SPDX-License-Identifier: Apache-2.0
"""Adapters beside a model that has none: merged into its weights, and gradients by the chain rule.

With W' = W + s B A, the gradient of A is s B^T dW' and that of B is s dW' A^T.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from echelon.core.model_shape import ModelShape

_A, _B = ".lora_a.weight", ".lora_b.weight"


def merged(shape: ModelShape, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of the model with what adapters add, in float64, under its own names."""
    found = {name: one for name, one in values.items() if not name.endswith((_A, _B))}
    assert shape.lora is not None, "nothing to merge"
    for layer in _layers(values):
        product = values[layer + _B].double() @ values[layer + _A].double()
        found[f"{layer}.weight"] = found[f"{layer}.weight"].double() + shape.lora.scale * product
    return found


def adapter_gradients(
    shape: ModelShape, values: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the gradients of adapters, from those of the weights that they are merged into."""
    assert shape.lora is not None, "nothing is adapted"
    found: dict[str, torch.Tensor] = {}
    for layer in _layers(values):
        whole = shape.lora.scale * gradients[f"{layer}.weight"].double()
        found[layer + _A] = values[layer + _B].double().T @ whole
        found[layer + _B] = whole @ values[layer + _A].double().T
    return found


def _layers(values: Mapping[str, torch.Tensor]) -> Iterator[str]:
    return (name.removesuffix(_A) for name in values if name.endswith(_A))
