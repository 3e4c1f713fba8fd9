# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are a function of (key, index), from their definition.

The key of some words is the first 8 bytes of the BLAKE2b hash of their text, joined by zero bytes,
as a big-endian number. The bits at an index are SplitMix64's finaliser (Steele et al., "Fast
Splittable Pseudorandom Number Generators", 2014) of key + index x golden ratio, modulo 2^64. Their
upper 53 bits, plus a half, over 2^53 are uniform; the normal value is the quantile of that.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio."""

_WORD = 2**64 - 1  # the largest number of 64 bits
_LARGEST = 1.0 - 2.0**-53  # a uniform value


@overload
def mixed(bits: int) -> int: ...
@overload
def mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]: ...
def mixed(bits: Any) -> Any:
    """Return SplitMix64's finaliser of 64 bits, or of each number of an array."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _WORD
    return bits ^ (bits >> 31)


def key_of(*words: object) -> int:
    """Return the key that some words have."""
    text = "\0".join(map(str, words)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


def uniforms(key: int, first: int, count: int) -> NDArray[np.float64]:
    """Return the uniform values in (0, 1) at `count` indices from `first` on."""
    indices = np.arange(first, first + count, dtype=np.uint64)
    upper = mixed(indices * np.uint64(GOLDEN) + np.uint64(key)) >> np.uint64(11)
    return np.minimum((upper.astype(np.float64) + 0.5) / 2.0**53, _LARGEST)


def normals(key: int, count: int) -> torch.Tensor:
    """Return the first `count` standard normal values, float64."""
    return torch.special.ndtri(torch.from_numpy(uniforms(key, 0, count)))
