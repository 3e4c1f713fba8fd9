# SPDX-License-Identifier: Apache-2.0
"""The rows of which byte predictions consist, and what one rank sends in one collective.

The counts are those of bandwidth-optimal algorithms (Thakur et al., "Optimization of Collective
Communication Operations in MPICH", 2005; Patarasuk and Yuan, 2009): what a ring or a pairwise
exchange of `degree` ranks sends over the links, not the payload.
`parallel/transport/collectives.py` records exactly these and the byte formulas of a plan add them
up; a test compares them with the kernel's own counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from echelon.core.axis import Axis
from echelon.core.plan import DTYPE_BYTES, Plan

Pool = Literal["device", "host", "nvme"]
"""Where bytes rest. On a machine without GPU "device" is main memory, counted apart from "host"."""

INDEX_BYTES = 8
"""Bytes of an index or a count (int64): token ids, positions, places of rows."""

WIDE_BYTES = 4
"""Bytes of a sum, statistic, score or scale, at least: these are computed in fp32 or wider."""


SentBytes = int | tuple[int, int | None]
"""What is sent; or that, and how much of it to other nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentTerm:
    """Say what one kind of message adds to the bytes that a rank sends per step.

    `each` is what one round of it sends (a round may be one message per bucket), `count` how many
    rounds there are; what comes once in several steps says so by `every`. `formula` is in the
    letters of the file that gives the term; `source` is where it comes from.
    """

    axis: str
    name: str
    count: int = 1
    each: int
    every: int = 1
    far: int | None = None
    """Of `each`, what goes to other nodes; None where nobody tells. A library's own all-reduce is
    told of as a ring in the order of ranks."""
    formula: str
    source: str

    @property
    def bytes(self) -> int:
        """Return the bytes of all of them, in a mean step (rounded down)."""
        return self.count * self.each // self.every

    @property
    def far_bytes(self) -> int | None:
        """Bytes of all messages that go to other nodes; None if unknown."""
        return None if self.far is None else self.count * self.far // self.every


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTerm:
    """Say how many bytes of one kind a rank holds in one pool; `padding` of them hold nothing."""

    name: str
    bytes: int
    formula: str
    pool: Pool = "device"
    padding: int = 0


def far_bytes_by_axis(terms: Iterable[SentTerm]) -> dict[str, int]:
    """Bytes to other nodes by axis; no axis with a term whose bytes are unknown."""
    terms = [term for term in terms if term.bytes]
    unknown = {term.axis for term in terms if term.far_bytes is None}
    total = dict.fromkeys((term.axis for term in terms if term.axis not in unknown), 0)
    for term in terms:
        if term.axis in total:
            total[term.axis] += term.far_bytes or 0
    return total


def element_bytes(plan: Plan) -> int:
    """Return s: the bytes of an element of parameters and activations."""
    return DTYPE_BYTES[plan.mathematics.precision.parameters]


def pass_terms(
    axis: Axis,
    name: str,
    source: str,
    *,
    counts: tuple[int, int],
    each: tuple[SentBytes, SentBytes],
    formulas: tuple[str, ...],
) -> Iterator[SentTerm]:
    """Yield what is sent in forward passes, in those that are repeated, and in backward ones.

    `counts` are the passes, and those once more; `each` and `formulas` forward and backward.
    """
    sent = [(one, None) if isinstance(one, int) else one for one in each]
    for way, count, back in (
        ("forward", counts[0], False),
        ("forward again", counts[1], False),
        ("backward", counts[0], True),
    ):
        yield SentTerm(
            axis=axis.value,
            name=f"{name} {way}",
            count=count,
            each=sent[back][0],
            far=sent[back][1],
            formula=formulas[back],
            source=source,
        )


def all_reduce_bytes(payload: int, degree: int) -> int:
    """Return 2 (n-1)/n of the payload: a reduce-scatter, then an all-gather."""
    return 2 * (degree - 1) * payload // degree


def all_gather_bytes(piece: int, degree: int) -> int:
    """Return n-1 times the piece that each rank puts in."""
    return (degree - 1) * piece


def reduce_scatter_bytes(piece: int, degree: int) -> int:
    """Return n-1 times the piece that each rank gets out."""
    return (degree - 1) * piece


def all_to_all_bytes(payload: int, degree: int) -> int:
    """Return the (n-1)/n of the payload that is for other ranks (equal splits)."""
    return (degree - 1) * payload // degree
