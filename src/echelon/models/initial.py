"""First values of parameters: a function of (seed, canonical name, global index) only.

Matrices are normal with the model's standard deviation; the matrices that write to the residual
stream are scaled down by sqrt(2 x layers) (GPT-2, section 2.3). Values are rounded to float32
before any other dtype, so a float64 proof starts from the very numbers of the float32 run.
"""

from __future__ import annotations

import torch

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import ParameterSpec
from echelon.models.counter_random import make_key, normal_rectangle


def initial_values(
    shape: ModelShape,
    spec: ParameterSpec,
    seed: int,
    *,
    offset: tuple[int, ...] | None = None,
    size: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Return the float32 rectangle of a parameter that starts at `offset` (default: all of it)."""
    offset = offset or (0,) * len(spec.shape)
    size = size or spec.shape
    if spec.initial == "ones":
        return torch.ones(size)
    if spec.initial == "zeros":
        return torch.zeros(size)
    std = shape.initial_std
    if spec.initial == "residual":
        std /= (2 * shape.layers) ** 0.5
    key = make_key("parameter", seed, spec.name)
    return (normal_rectangle(key, spec.shape, offset, size) * std).float()
