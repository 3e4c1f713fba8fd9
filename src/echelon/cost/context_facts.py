"""Facts about long sequences in closed form: keys and values, activations, and a split by hand.

What training keeps of keys and values are activations for backward (with recompute, those of one
block at a time); what generation keeps is the cache. Their bytes are the same formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, exp, log, sin

Vector = tuple[float, ...]


def kv_bytes(positions: int, kv_dim: int, layers: int, size: int = 2) -> int:
    """Return the bytes of keys and values of a sequence: 2 T K h L s.

    `kv_dim` is the width of all key heads together: grouped queries need kv_heads / heads of what
    as many key heads as query heads would.
    """
    return 2 * positions * kv_dim * layers * size


def block_activation_bytes(
    positions: int, hidden: int, heads: int, *, tp: int = 1, sequence_parallel: bool = False
) -> float:
    """Return the bytes that a block of GPT keeps for backward, of one sequence in 16 bits.

    s h (34 + 5 a s / h) on one device; tensor ranks share 24 + 5 a s / h of it, sequence
    parallelism the other 10 too (Korthikanti et al., 2022, equations 1, 2 and 4). The term of the
    scores, 5 a s / h, is there where attention keeps them; fused kernels do not.
    """
    scores = 5 * heads * positions / hidden
    outside = 10 / tp if sequence_parallel else 10
    return positions * hidden * (outside + (24 + scores) / tp)


def errors_of_a_split(length: int = 16, ranks: int = 4) -> tuple[float, float, float]:
    """Return the largest error of the last rank's outputs of causal attention, by three ways.

    Each rank has a chunk of a small example. Against attention on one device: where a rank has its
    own keys only; where it meets all chunks and adds up their outputs with equal weights; where it
    merges them by their log-sum-exp.
    """
    angles = [0.7 * i for i in range(length)]
    q: list[Vector] = [(3 * sin(a), 2 * cos(2 * a)) for a in angles]
    k: list[Vector] = [(2 * cos(3 * a), 3 * sin(a + 1)) for a in angles]
    v: list[float] = [sin(5 * a) for a in angles]
    size = length // ranks
    worst = [0.0, 0.0, 0.0]
    for row in range(length - size, length):
        parts = [
            _attend(q[row], k[first : min(first + size, row + 1)], v[first:])
            for first in range(0, row + 1, size)
        ]
        whole, _ = _attend(q[row], k[: row + 1], v)
        total = log(sum(exp(lse) for _, lse in parts))
        ways = (
            parts[-1][0],
            sum(out for out, _ in parts) / len(parts),
            sum(out * exp(lse - total) for out, lse in parts),
        )
        worst = [max(old, abs(way - whole)) for old, way in zip(worst, ways, strict=True)]
    return worst[0], worst[1], worst[2]


def _attend(q: Vector, keys: Sequence[Vector], values: Sequence[float]) -> tuple[float, float]:
    """Return the output and the log-sum-exp of one query over some keys."""
    scores = [sum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
    lse = log(sum(exp(score) for score in scores))
    return sum(exp(s - lse) * value for s, value in zip(scores, values, strict=False)), lse
