"""The generator is SplitMix64's finaliser, and its normal values are quantiles."""

from __future__ import annotations

from hashlib import blake2b
from statistics import NormalDist

import numpy as np
import pytest

from echelon.proof.independent.weights import GOLDEN, key_of, mixed, normals, uniforms

SPLIT_MIX_64 = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
"""What the published generator gives first, seeded with 0."""


def test_the_finaliser_is_the_published_one() -> None:
    states = [number * GOLDEN % 2**64 for number in (1, 2, 3)]
    assert tuple(mixed(state) for state in states) == SPLIT_MIX_64
    assert mixed(np.array(states, dtype=np.uint64)).tolist() == list(SPLIT_MIX_64)


def test_a_key_is_the_hash_of_its_words() -> None:
    digest = blake2b(b"parameter\x000\x00norm.weight", digest_size=8).digest()
    assert key_of("parameter", 0, "norm.weight") == int.from_bytes(digest, "big")
    assert key_of("a", "bc") != key_of("ab", "c")


def test_values_depend_on_their_index_only() -> None:
    assert uniforms(7, 100, 5).tolist() == uniforms(7, 90, 20)[10:15].tolist()
    assert uniforms(2**64 - 1, 0, 4).min() > 0.0


def test_normal_values_are_the_quantiles_of_uniform_ones() -> None:
    key = key_of("test")
    right = [NormalDist().inv_cdf(one) for one in uniforms(key, 0, 500).tolist()]
    assert normals(key, 500).tolist() == pytest.approx(right, rel=1e-12)
