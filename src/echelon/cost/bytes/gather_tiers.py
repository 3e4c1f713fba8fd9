# SPDX-License-Identifier: Apache-2.0
"""Bytes of collectives inside of nodes and between them, exact for each rank.

A gather over n ranks is a message of the own piece to each of the n-1 others: of l ranks on the own
node, l-1 go inside, n-l to other nodes; by an algorithm of our own it is what `all_reduce.py` says.
In a step of M microbatches, with G bytes in the buckets of a rank that ZeRO 3 cuts and frees after
use, each gathered F times (twice a microbatch: 2 M), a rank sends to other nodes

    without secondary slices   F (n-l)/n G
    with them                  (n-l)/n G, and (F-1) (l-1)/l G more inside of its node
    by a hierarchy             F (k-1)/n G

Source: Wang et al., "ZeRO++", 2023, section 3.2 and table 1 (M for the second gather becomes 0).
"""

from __future__ import annotations

from collections.abc import Iterable

from echelon.core.plan import Plan
from echelon.cost.bytes.data import GATHERED, data_bytes
from echelon.cost.bytes.sent import bytes_sent
from echelon.cost.bytes.terms import SentTerm
from echelon.layout.buckets import plan_buckets
from echelon.layout.stage import part_of


def parameter_gather_tiers(plan: Plan, rank: int) -> tuple[int, int]:
    """Return what a rank sends in a step to gather parameters: inside of its node, and beyond."""
    part = part_of(plan, rank)
    terms = data_bytes(plan, part, plan_buckets(plan, part), rank)
    return _tiers(term for term in terms if term.name.startswith(GATHERED))


def collective_tiers(plan: Plan, rank: int) -> dict[str, tuple[int, int]]:
    """Return what a rank sends in a step over each axis: inside of its node, and beyond.

    Only of axes all of whose terms tell.
    """
    by_axis: dict[str, list[SentTerm]] = {}
    for term in bytes_sent(plan, rank):
        by_axis.setdefault(term.axis, []).append(term)
    return {
        axis: _tiers(terms)
        for axis, terms in by_axis.items()
        if all(term.far is not None for term in terms)
    }


def _tiers(terms: Iterable[SentTerm]) -> tuple[int, int]:
    near = far = 0
    for term in terms:
        beyond = term.count * (term.far or 0) // term.every
        near, far = near + term.bytes - beyond, far + beyond
    return near, far
