"""Bytes that one rank sends in a collective over `degree` ranks.

These are the counts of bandwidth-optimal algorithms (Thakur et al., "Optimization of Collective
Communication Operations in MPICH", 2005; Patarasuk and Yuan, 2009): what a ring or a pairwise
exchange sends over the links, not the payload. `parallel/collectives.py` records exactly these and
the byte formulas of a plan add them up; a test compares them with the kernel's own counter.
"""

from __future__ import annotations


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
