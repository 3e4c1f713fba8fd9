# SPDX-License-Identifier: Apache-2.0
"""Rotary positions (Su et al., RoFormer, section 3.2), and how their frequencies are stretched.

    llama3    low ones divided, high ones kept, a blend between (Llama 3, 2024, section 3.4.2)
    linear    all divided: positions interpolated (Chen et al., 2023)
    yarn      a blend that goes by dims; scores are sharpened (Peng et al., "YaRN", 2023)
    longrope  a divisor for each, found by a search (Ding et al., "LongRoPE", 2024)

Dims of a head that do not turn have the frequency 0: their cosine is 1 and their sine 0. They come
behind those that turn, in each half of a head. What stretched frequencies sharpen scores by is in
the tables too, its root for queries and its root for keys (Peng et al., 2023, section 3.4).

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
    *,
    length: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos_TE and sin_TE for positions on the host, computed in float64 there, as `dtype`.

    They are on `device`, or where the positions are. `length` is that of the whole sequence, by
    which longrope goes.
    """
    width = shape.head_dim if shape.latent is None else shape.latent.rope_dim
    turned, factor = shape.turned_dims, 1.0
    exponents = torch.arange(0, turned, 2, dtype=torch.float64) / max(turned, 1)
    frequencies_E = shape.rope_theta**-exponents
    if shape.rope_scaling is not None and turned:
        scaling = shape.rope_scaling
        frequencies_E = scale_frequencies(frequencies_E, scaling, shape.rope_theta, length)
        factor = attention_factor(scaling)
    still = (0, (width - turned) // 2)
    factors_E = fn.pad(torch.full_like(frequencies_E, factor), still, value=1.0)
    frequencies_E = fn.pad(frequencies_E, still)
    angles_TE = torch.outer(positions_T.double(), frequencies_E)
    place = {"device": device or positions_T.device, "dtype": dtype}
    return (angles_TE.cos() * factors_E).to(**place), (angles_TE.sin() * factors_E).to(**place)


def rotary_key(shape: ModelShape, length: int) -> tuple[object, ...]:
    """Return what tables of the same positions have in common where they are the same."""
    scaling = shape.rope_scaling
    longer = scaling is not None and bool(scaling.long_factors) and _is_long(scaling, length)
    return shape.rope_theta, scaling, shape.rotary, longer


def scale_frequencies(
    frequencies_E: torch.Tensor, scaling: RopeScaling, theta: float, length: int
) -> torch.Tensor:
    """Return the frequencies of a base `theta`, stretched for a sequence of `length` positions."""
    if scaling.kind == "linear":
        return frequencies_E / scaling.factor
    if scaling.kind == "longrope":
        factors = scaling.long_factors if _is_long(scaling, length) else scaling.short_factors
        return frequencies_E / torch.tensor(factors, dtype=torch.float64)
    if scaling.kind == "yarn":
        kept_E = 1.0 - _yarn_ramp(len(frequencies_E), scaling, theta)
    else:
        assert scaling.original_positions is not None, "a rule asks for it"
        turns_E = scaling.original_positions * frequencies_E / (2 * math.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        assert low is not None, "a rule asks for it"
        assert high is not None, "a rule asks for it"
        kept_E = ((turns_E - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies_E * (kept_E + (1 - kept_E) / scaling.factor)


def attention_factor(scaling: RopeScaling) -> float:
    """Return what cosines and sines are multiplied by, so scores by its square."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1.0:
        return 1.0
    if scaling.kind == "yarn":
        return 0.1 * math.log(scaling.factor) + 1.0
    if scaling.kind == "longrope":
        assert scaling.original_positions is not None, "a rule asks for it"
        return math.sqrt(1.0 + math.log(scaling.factor) / math.log(scaling.original_positions))
    return 1.0


def _is_long(scaling: RopeScaling, length: int) -> bool:
    assert scaling.original_positions is not None, "a rule asks for it"
    return length > scaling.original_positions


def _yarn_ramp(num_frequencies: int, scaling: RopeScaling, theta: float) -> torch.Tensor:
    """Return how much of each frequency is stretched: 0 of those that turn often, then up to 1."""
    assert scaling.original_positions is not None, "a rule asks for it"
    positions, width = scaling.original_positions, 2 * num_frequencies

    def dim(turns: float) -> float:
        """Return the frequency that turns so often over the original positions."""
        return width * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim(scaling.fast_turns), dim(scaling.slow_turns)
    if scaling.whole_dims:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp_E = (torch.arange(num_frequencies, dtype=torch.float64) - low) / (high - low)
    return ramp_E.clamp(0.0, 1.0)
