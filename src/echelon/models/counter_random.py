"""Random numbers that are a function of (key, index): any rank can make any part of them.

A counter-based generator in the sense of Salmon et al., "Parallel Random Numbers: As Easy as
1, 2, 3" (2011); the mixing function is SplitMix64's finaliser (Steele et al., 2014). Because the
value at an index does not depend on who asks, one seed gives one model and one dropout mask under
every layout, with no seed checkpoint and no generator state to save.
"""

from __future__ import annotations

import hashlib
from math import prod

import torch

_CHUNK = 1 << 16  # elements
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


def normal_rectangle(
    key: int, shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]
) -> torch.Tensor:
    """Return the rectangle at `offset` of `size` of a standard normal tensor of `shape`, float64.

    Made in pieces that stay in cache; costs about as much as it would to fill the rectangle from
    a sequential generator, and nothing for what lies outside of it.
    """
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    index = torch.zeros(1, dtype=torch.int64)
    for dim, stride in enumerate(strides):
        steps = torch.arange(offset[dim], offset[dim] + size[dim], dtype=torch.int64) * stride
        index = (index.unsqueeze(-1) + steps).reshape(-1)
    values = torch.empty(index.numel(), dtype=torch.float64)
    for start in range(0, index.numel(), _CHUNK):
        piece = slice(start, start + _CHUNK)
        values[piece] = normal(key, index[piece])
    return values.reshape(size)


def _shift_right(bits: torch.Tensor, by: int) -> torch.Tensor:
    # `>>` on int64 keeps the sign; a counter-based generator needs zeros shifted in.
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)
