"""Which samples a step reads: a function of (seed, step), never of the world size.

An epoch is a permutation of all samples without replacement. Sample number `p` of the run is
entry `p % num_samples` of the permutation of epoch `p // num_samples`, and step N takes numbers
N * count to (N + 1) * count, so a step may straddle epochs, and a run resumes anywhere from its
step alone. The ranks share out one list (`batches.py`): their parts are disjoint and together are
the step. A sampler per rank that pads to a multiple of the ranks (10 samples on 4 ranks: 2 are
read twice; or 2 are dropped) has no counterpart here: nothing is padded or dropped, the next epoch
begins in the same step.

The permutation is a keyed bijection, a Feistel network on the bits of the index with cycle-walking
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), so a step costs O(count) time
and no memory, whatever the number of samples. The mixing function is SplitMix64's finaliser.

Shape suffixes: R rounds, N samples.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 12
# Round functions of one to five bits mix slowly: with 12 rounds the permutations of 7 samples are
# measurably uneven, with 32 they pass a chi-square test over all 5040.
_ROUNDS_SMALL = 32
_SMALL_BITS = 12
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


def sample_ids(*, seed: int, step: int, num_samples: int, count: int) -> NDArray[np.int64]:
    """Return the `count` sample ids of step `step`, each in [0, num_samples)."""
    assert num_samples > 0
    assert step >= 0
    assert count >= 0
    first = step * count
    position = first % num_samples + np.arange(count, dtype=np.int64)
    epoch = first // num_samples + position // num_samples
    bits = (num_samples - 1).bit_length()
    keys_RN = _keys(seed, epoch, _ROUNDS_SMALL if bits < _SMALL_BITS else _ROUNDS)
    value = (position % num_samples).astype(np.uint64)
    outside = np.arange(count)
    while len(outside):
        value[outside] = _feistel(value[outside], keys_RN[:, outside], bits)
        outside = outside[value[outside] >= np.uint64(num_samples)]
    return value.astype(np.int64)


def sequential_ids(*, batch: int, count: int) -> NDArray[np.int64]:
    """Return the sample ids of validation batch `batch`: in order, without end.

    Ids past the last sample are read as sequences without a counted token, so the last batch of a
    validation pass is as large as the others and counts every token once.
    """
    return batch * count + np.arange(count, dtype=np.int64)


def _keys(seed: int, epoch: NDArray[np.int64], num_rounds: int) -> NDArray[np.uint64]:
    """Return the keys of all rounds for each entry of `epoch`."""
    text = f"sample-order\0{seed}".encode()
    base = np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), dtype="<u8")
    keys = _mix(_mix(epoch.astype(np.uint64) * _GOLDEN + base))
    rounds = np.arange(1, num_rounds + 1, dtype=np.uint64) * _GOLDEN
    return _mix(keys[np.newaxis, :] + rounds[:, np.newaxis])


def _feistel(
    value: NDArray[np.uint64], keys_RN: NDArray[np.uint64], bits: int
) -> NDArray[np.uint64]:
    """Map [0, 2**bits) onto itself; the two parts of the bits may differ in width by one."""
    right_bits = np.uint64((bits + 1) // 2)
    right_mask = np.uint64((1 << ((bits + 1) // 2)) - 1)
    left_mask = np.uint64((1 << (bits // 2)) - 1)
    left, right = value >> right_bits, value & right_mask
    for number, keys in enumerate(keys_RN):
        if number % 2 == 0:
            left = left ^ (_mix(right ^ keys) & left_mask)
        else:
            right = right ^ (_mix(left ^ keys) & right_mask)
    return (left << right_bits) | right


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> _SHIFT_1)) * _MIX_1
    bits = (bits ^ (bits >> _SHIFT_2)) * _MIX_2
    return bits ^ (bits >> _SHIFT_3)
