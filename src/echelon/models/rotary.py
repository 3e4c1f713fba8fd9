"""Rotary positions (Su et al., RoFormer, section 3.2), with Llama 3.1's frequency scaling.

Shape suffixes: T positions, E frequencies: half of the head dims that turn.
"""

from __future__ import annotations

import math

import torch

from echelon.core.model_shape import ModelShape, RopeScaling


def rotary_tables(
    shape: ModelShape,
    positions_T: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos_TE and sin_TE for positions on the host, computed in float64 there, as `dtype`.

    They are on `device`, or where the positions are.
    """
    width = shape.head_dim if shape.latent is None else shape.latent.rope_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    frequencies_E = shape.rope_theta**-exponents
    if shape.rope_scaling is not None:
        frequencies_E = scale_frequencies(frequencies_E, shape.rope_scaling)
    angles_TE = torch.outer(positions_T.double(), frequencies_E)
    place = {"device": device or positions_T.device, "dtype": dtype}
    return angles_TE.cos().to(**place), angles_TE.sin().to(**place)


def scale_frequencies(frequencies_E: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Return the frequencies of Llama 3.1: low ones divided by `factor`, high ones kept."""
    turns_E = scaling.original_positions * frequencies_E / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept_E = ((turns_E - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies_E * (kept_E + (1 - kept_E) / scaling.factor)
