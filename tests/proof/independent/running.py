"""A sequence that meets random weights, for tests of single parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from echelon.core.experts import Balance
from echelon.core.model_shape import ModelShape
from echelon.proof.independent.sequence import SequenceRun
from echelon.proof.independent.weights import weights_of


def random_weights(model: ModelShape, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return weights of which none is 0 or 1, float64."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.3 * torch.randn(fact.shape, generator=generator, dtype=torch.float64) + 0.1
        for name, fact in weights_of(model).items()
    }


def sequence_run(
    model: ModelShape, weights: Mapping[str, torch.Tensor], tokens: list[int], **changes: Any
) -> SequenceRun:
    """Return a sequence in the first block of a model."""
    defaults: dict[str, Any] = {
        "balance": Balance(),
        "biases": {},
        "documents": (0,),
        "sample": 0,
        "step": 0,
        "seed": 0,
        "unit": "layers.0",
    }
    return SequenceRun(model=model, weights=weights, tokens=tokens, **{**defaults, **changes})
