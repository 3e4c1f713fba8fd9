# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are a function of (key, index): any rank can make any part of them.

A counter-based generator in the sense of Salmon et al., "Parallel Random Numbers: As Easy as
1, 2, 3" (2011); the mixing function is SplitMix64's finaliser (Steele et al., 2014). Because the
value at an index does not depend on who asks, one seed gives one model and one dropout mask under
every layout, with no seed checkpoint and no generator state to save.

First values of parameters are a function of (seed, canonical name, global index) only. Matrices are
normal with the model's standard deviation; the matrices that write to the residual stream are
scaled down by sqrt(2 x layers) (GPT-2, section 2.3). The first matrix of an adapter is uniform
within 1 / sqrt(inputs), as PEFT makes it. Values are rounded to float32 before any other dtype, so
a float64 proof starts from the very numbers of the float32 run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import prod

import torch

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import ParameterSpec
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def make_key(*parts: object) -> int:
    """Return a signed 64-bit key that depends on the text of all `parts`."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def uniform(key: int, index: torch.Tensor) -> torch.Tensor:
    """Return float64 values in (0, 1), one for each int64 of `index`."""
    bits = _mix(index * _GOLDEN + key)
    values = (_shift_right(bits, 11).double() + 0.5) * 2.0**-53
    # The largest of the 2^53 values rounds to 1, of which a normal value would be infinite.
    return values.clamp_(max=1.0 - 2.0**-53)


def normal(key: int, index: torch.Tensor) -> torch.Tensor:
    """Return float64 standard normal values, one for each int64 of `index`."""
    return torch.special.ndtri(uniform(key, index))


def normal_pieces(
    into: torch.Tensor,
    key: int,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    pieces: PieceSizes = TRAINING_PIECES,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield parts of `into` and standard normal values for each, float64 where `into` is.

    The parts are all of `into`, the rectangle at `offset` of a tensor of `shape`. All of it costs
    about as much as it would from a sequential generator, and nothing for what lies outside of it.
    """
    for part, index in _indexed_pieces(into, shape, offset, pieces):
        yield part, normal(key, index).view(part.shape)


def uniform_pieces(
    into: torch.Tensor,
    key: int,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    pieces: PieceSizes = TRAINING_PIECES,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield parts of `into` and values in (0, 1) for each, as `normal_pieces` does."""
    for part, index in _indexed_pieces(into, shape, offset, pieces):
        yield part, uniform(key, index).view(part.shape)


def _indexed_pieces(
    into: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...], pieces: PieceSizes
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield parts of `into` that are all of it, with the index of each element in the whole."""
    device = into.device
    limit = pieces.random_elements if device.type == "cpu" else pieces.gpu_random_elements
    for part, place in _pieces(into, offset, limit):
        index = torch.zeros(1, dtype=torch.int64, device=device)
        for dim, size in enumerate(part.shape):
            start = place[dim]
            steps = torch.arange(start, start + size, dtype=torch.int64, device=device)
            index = (index.unsqueeze(-1) + steps * prod(shape[dim + 1 :])).reshape(-1)
        yield part, index


def _pieces(
    into: torch.Tensor, offset: tuple[int, ...], limit: int
) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Yield views of at most `limit` elements that are all of a tensor, and where each begins."""
    if into.numel() <= limit or not into.dim():
        if into.numel():
            yield into, offset
        return
    rows = max(1, limit // prod(into.shape[1:]))
    for start in range(0, len(into), rows):
        part, place = into[start : start + rows], (offset[0] + start, *offset[1:])
        if part.numel() <= limit:
            yield part, place
        else:
            for inner, there in _pieces(part[0], place[1:], limit):
                yield inner.unsqueeze(0), (place[0], *there)


def _shift_right(bits: torch.Tensor, by: int) -> torch.Tensor:
    # `>>` on int64 keeps the sign; a counter-based generator needs zeros shifted in.
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def initial_values(
    shape: ModelShape,
    spec: ParameterSpec,
    seed: int,
    *,
    offset: tuple[int, ...] | None = None,
    into: torch.Tensor | None = None,
    pieces: PieceSizes = TRAINING_PIECES,
) -> torch.Tensor:
    """Return the rectangle of a parameter that starts at `offset` (default: all of it).

    It is written into `into` if given, which has its shape and may be a view; it is made
    on the device of that, in `pieces`. Else it is all of the parameter, in float32.
    """
    offset = offset or (0,) * len(spec.shape)
    values = torch.empty(spec.shape) if into is None else into
    first, spread = float(spec.initial == "ones"), shape.initial_spread
    if spec.initial in ("ones", "zeros") and not spread:
        return values.fill_(first)
    key = make_key("parameter", seed, spec.name)
    if spec.initial in ("ones", "zeros"):
        for part, drawn in uniform_pieces(values, key, spec.shape, offset, pieces):
            part.copy_((first + (2.0 * drawn - 1.0) * spread).float())
        return values
    if spec.initial == "fan-in":
        for part, drawn in uniform_pieces(values, key, spec.shape, offset, pieces):
            part.copy_(((2.0 * drawn - 1.0) / spec.shape[1] ** 0.5).float())
        return values
    std = shape.initial_std
    if spec.initial == "residual":
        std /= (2 * shape.layers) ** 0.5
    for part, normal in normal_pieces(values, key, spec.shape, offset, pieces):
        part.copy_((normal * std).float())
    return values
