# SPDX-License-Identifier: Apache-2.0
"""What a step of training reads, from its definition: the order of samples, rows, document starts.

Sample p of a run is entry p mod n of the permutation of epoch p // n; step N takes the next B of
them. The permutation is a balanced Feistel network over the bits of n - 1, walked until it lands
below n (Black and Rogaway, 2002), of 32 rounds below 12 bits and 12 from there on. Even rounds
change the upper half by the lower one. The key of round r is mixed(key of the epoch + r x golden
ratio), that of an epoch mixed(mixed(epoch x golden ratio + key of the seed)), and the key of the
seed the hash of "sample-order", a zero byte and the seed, little-endian.

A mixture of S sources has phases, each with a weight for every source until a step. 65,536 places
are shared out by the weights of a phase, the largest remainders rounded up; place k of the n of a
source stands at (k + 1/2) / n, and the sequences of the phase follow these places in order, those
of the first source before others, over and over. Sequence number p of a source is entry p mod n of
the permutation of its epoch p // n, whose key is that of the seed, a zero byte and the hash of the
source. The samples of all sources are numbered one source after the other.

Sample i of a text is its tokens from i T on, each followed by the label that comes next. What lies
behind the end of the text is end-of-document with no label (-100).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from heapq import merge

from echelon.proof.independent.weights import GOLDEN, mixed

_WORD = 2**64  # one more than the largest number of 64 bits
_PLACES = 65_536  # of the pattern of a phase
_NO_LABEL = -100  # the label of a position that takes no part in the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRow:
    """Hold one sequence that training reads."""

    sample: int
    tokens: list[int]
    labels: list[int]
    documents: tuple[int, ...]


def samples_of_step(
    seed: int, step: int, count: int, num_samples: int, *, pad: bool = False
) -> list[int]:
    """Return the samples of a step of `count` sequences.

    With `pad` an epoch is whole steps: its last one repeats the samples with which it began.
    """
    per_epoch = -(-num_samples // count) * count if pad else num_samples
    return [
        _permuted(f"{seed}", number // per_epoch, number % per_epoch % num_samples, num_samples)
        for number in range(step * count, (step + 1) * count)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Hold what is known of a source of a mixture: the hash of its data, and its samples."""

    hash: str
    num_samples: int


def mixed_samples(
    seed: int,
    num_steps: int,
    count: int,
    sources: Sequence[Source],
    phases: Sequence[tuple[int | None, Sequence[float]]],
) -> Iterator[list[int]]:
    """Yield the samples of each step of `count` sequences, numbered one source after the other.

    A phase is the step before which it ends (None: it does not), and the weights of all sources.
    """
    given = [0] * len(sources)
    ahead = list(phases)
    until, weights = ahead.pop(0)
    pattern = _pattern(weights)
    for step in range(num_steps):
        if until is not None and step >= until:
            until, weights = ahead.pop(0)
            pattern = _pattern(weights)
        found: list[int] = []
        for _ in range(count):
            s = next(pattern)
            n, p = sources[s].num_samples, given[s]
            given[s] += 1
            first = sum(one.num_samples for one in sources[:s])
            found.append(first + _permuted(f"{seed}\0{sources[s].hash}", p // n, p % n, n))
        yield found


def _pattern(weights: Sequence[float]) -> Iterator[int]:
    """Yield the source of every sequence of a phase, without end."""
    places = _places(weights)
    while True:
        yield from (s for _, s in merge(*(_of_source(s, n) for s, n in enumerate(places))))


def _of_source(source: int, places: int) -> Iterator[tuple[Fraction, int]]:
    """Yield where each place of a source stands."""
    for k in range(places):
        yield Fraction(2 * k + 1, 2 * places), source


def _places(weights: Sequence[float]) -> list[int]:
    """Return how many of the places each source has."""
    exact = [_PLACES * Fraction(one) / sum(map(Fraction, weights)) for one in weights]
    places = [int(one) for one in exact]
    while sum(places) < _PLACES:
        left = [one - have for one, have in zip(exact, places, strict=True)]
        places[left.index(max(left))] += 1
    return places


def read_row(text: Sequence[int], sample: int, length: int, end: int) -> ReadRow:
    """Return a sample of a text, and where its documents start."""
    tokens = [int(one) for one in text[sample * length : (sample + 1) * length + 1]]
    inputs, labels = tokens[:length], tokens[1:]
    inputs += [end] * (length - len(inputs))
    labels += [_NO_LABEL] * (length - len(labels))
    return ReadRow(
        sample=sample, tokens=inputs, labels=labels, documents=document_starts(inputs, end)
    )


def document_starts(tokens: Sequence[int], end: int) -> tuple[int, ...]:
    """Return where documents of a text start: behind each end that no other end follows."""
    starts = [t for t in range(1, len(tokens)) if tokens[t - 1] == end and tokens[t] != end]
    return (0, *starts)


def _permuted(order: str, epoch: int, index: int, num_samples: int) -> int:
    bits = (num_samples - 1).bit_length()
    text = f"sample-order\0{order}".encode()
    of_seed = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
    of_epoch = mixed(mixed((epoch * GOLDEN + of_seed) % _WORD))
    keys = [mixed((of_epoch + r * GOLDEN) % _WORD) for r in range(1, 33 if bits < 12 else 13)]
    while True:
        index = _through_rounds(index, keys, bits)
        if index < num_samples:
            return index


def _through_rounds(index: int, keys: Sequence[int], bits: int) -> int:
    lower = (bits + 1) // 2
    high, low = divmod(index, 2**lower)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            high ^= mixed(low ^ key) % 2 ** (bits // 2)
        else:
            low ^= mixed(high ^ key) % 2**lower
    return high * 2**lower + low
