# SPDX-License-Identifier: Apache-2.0
"""The numbers of a model whose adapters alone are trained (`core/choices/lora.py`)."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.choices.lora import LINEAR_GROUPS
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import (
    is_adapter,
    num_parameters,
    num_trained_parameters,
    parameters,
)
from echelon.cost.activations.from_plan import adapter_rows
from echelon.cost.inputs.numbers import ModelNumbers


def with_adapters(numbers: ModelNumbers, shape: ModelShape) -> ModelNumbers:
    """Return the numbers of a shape with those of its adapters; as they are, where it has none."""
    if shape.lora is None:
        return numbers
    own = [spec for spec in parameters(shape) if spec.layer == 0 and is_adapter(spec.name)]
    split = sum(spec.numel for spec in own if spec.split_dim is not None)
    rows = adapter_rows(shape)
    # What both branches read through one norm is there once anyway, unless both keep it.
    once = shape.residual == "parallel-one-norm" and not (rows[0] and rows[2])
    return replace(
        numbers,
        frozen=1.0,
        extra_streams=numbers.extra_streams + once,
        trained=num_trained_parameters(shape) / num_parameters(shape),
        adapters_attention_in=float(rows[0] + sum(rows[len(LINEAR_GROUPS) :])),
        adapters_attention_out=float(rows[1]),
        adapters_mlp_in=float(rows[2]),
        adapters_mlp_out=float(rows[3]),
        adapters_whole=float(sum(spec.numel for spec in own) - split),
        adapters_split=float(split),
    )
