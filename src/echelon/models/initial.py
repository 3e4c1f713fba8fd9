# SPDX-License-Identifier: Apache-2.0
"""First values of parameters: a function of (seed, canonical name, global index) only.

Matrices are normal with the model's standard deviation; the matrices that write to the residual
stream are scaled down by sqrt(2 x layers) (GPT-2, section 2.3). The first matrix of an adapter is
uniform within 1 / sqrt(inputs), as PEFT makes it. Values are rounded to float32
before any other dtype, so a float64 proof starts from the very numbers of the float32 run.
"""

from __future__ import annotations

import torch

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import ParameterSpec
from echelon.models.counter_random import make_key, normal_pieces, uniform_pieces


def initial_values(
    shape: ModelShape,
    spec: ParameterSpec,
    seed: int,
    *,
    offset: tuple[int, ...] | None = None,
    size: tuple[int, ...] | None = None,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rectangle of a parameter that starts at `offset` (default: all of it).

    It is written into `into` where that is given, which is of `size` and may be a view; it is made
    on the device of that, piece by piece. Else it is new, in float32.
    """
    offset = offset or (0,) * len(spec.shape)
    values = torch.empty(size or spec.shape) if into is None else into
    if spec.initial in ("ones", "zeros"):
        return values.fill_(float(spec.initial == "ones"))
    key = make_key("parameter", seed, spec.name)
    if spec.initial == "fan-in":
        for part, drawn in uniform_pieces(values, key, spec.shape, offset):
            part.copy_(((2.0 * drawn - 1.0) / spec.shape[1] ** 0.5).float())
        return values
    std = shape.initial_std
    if spec.initial == "residual":
        std /= (2 * shape.layers) ** 0.5
    for part, normal in normal_pieces(values, key, spec.shape, offset):
        part.copy_((normal * std).float())
    return values
