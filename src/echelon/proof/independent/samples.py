"""What a step of training reads, from its definition: the order of samples, rows, document starts.

Sample p of a run is entry p mod n of the permutation of epoch p // n; step N takes the next B of
them. The permutation is a balanced Feistel network over the bits of n - 1, walked until it lands
below n (Black and Rogaway, 2002), of 32 rounds below 12 bits and 12 from there on. Even rounds
change the upper half by the lower one. The key of round r is mixed(key of the epoch + r x golden
ratio), that of an epoch mixed(mixed(epoch x golden ratio + key of the seed)), and the key of the
seed the hash of "sample-order", a zero byte and the seed, little-endian.

Sample i of a text is its tokens from i T on, each followed by the label that comes next. What lies
behind the end of the text is end-of-document with no label (-100).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from echelon.proof.independent.random_numbers import GOLDEN, mixed

_WORD = 2**64  # one more than the largest number of 64 bits
_NO_LABEL = -100  # the label of a position that takes no part in the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRow:
    """Hold one sequence that training reads."""

    sample: int
    tokens: list[int]
    labels: list[int]
    documents: tuple[int, ...]


def samples_of_step(seed: int, step: int, count: int, num_samples: int) -> list[int]:
    """Return the samples of a step of `count` sequences."""
    return [
        _permuted(seed, number // num_samples, number % num_samples, num_samples)
        for number in range(step * count, (step + 1) * count)
    ]


def read_row(text: Sequence[int], sample: int, length: int, end: int) -> ReadRow:
    """Return a sample of a text, and where its documents start."""
    tokens = [int(one) for one in text[sample * length : (sample + 1) * length + 1]]
    inputs, labels = tokens[:length], tokens[1:]
    inputs += [end] * (length - len(inputs))
    labels += [_NO_LABEL] * (length - len(labels))
    starts = [t for t in range(1, length) if inputs[t - 1] == end and inputs[t] != end]
    return ReadRow(sample=sample, tokens=inputs, labels=labels, documents=(0, *starts))


def _permuted(seed: int, epoch: int, index: int, num_samples: int) -> int:
    bits = (num_samples - 1).bit_length()
    text = f"sample-order\0{seed}".encode()
    of_seed = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
    of_epoch = mixed(mixed((epoch * GOLDEN + of_seed) % _WORD))
    keys = [mixed((of_epoch + r * GOLDEN) % _WORD) for r in range(1, 1 + _num_rounds(bits))]
    while True:
        index = _through_rounds(index, keys, bits)
        if index < num_samples:
            return index


def _num_rounds(bits: int) -> int:
    return 32 if bits < 12 else 12


def _through_rounds(index: int, keys: Sequence[int], bits: int) -> int:
    lower = (bits + 1) // 2
    high, low = divmod(index, 2**lower)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            high ^= mixed(low ^ key) % 2 ** (bits // 2)
        else:
            low ^= mixed(high ^ key) % 2**lower
    return high * 2**lower + low
