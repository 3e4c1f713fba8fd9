"""Rotary positions (Su et al., RoFormer, section 3.2), with Llama 3.1's frequency scaling.

Dims of a head that do not turn have the frequency 0: their cosine is 1 and their sine 0. They come
behind those that turn, in each half of a head. A scale of scores other than 1 / sqrt(head_dim) is
in the tables too, its root for queries and its root for keys, as YaRN has it (Peng et al., 2023,
section 3.4).

Shape suffixes: T positions, E frequencies: half of the dims of a head.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as fn

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
    turned = shape.turned_dims
    exponents = torch.arange(0, turned, 2, dtype=torch.float64) / max(turned, 1)
    frequencies_E = shape.rope_theta**-exponents
    if shape.rope_scaling is not None:
        frequencies_E = scale_frequencies(frequencies_E, shape.rope_scaling)
    frequencies_E = fn.pad(frequencies_E, (0, (width - turned) // 2))
    angles_TE = torch.outer(positions_T.double(), frequencies_E)
    place = {"device": device or positions_T.device, "dtype": dtype}
    factor = shape.turn_factor
    return (angles_TE.cos() * factor).to(**place), (angles_TE.sin() * factor).to(**place)


def scale_frequencies(frequencies_E: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Return the frequencies of Llama 3.1: low ones divided by `factor`, high ones kept."""
    turns_E = scaling.original_positions * frequencies_E / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept_E = ((turns_E - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies_E * (kept_E + (1 - kept_E) / scaling.factor)
