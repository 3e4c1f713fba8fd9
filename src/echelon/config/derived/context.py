# SPDX-License-Identifier: Apache-2.0
"""Settings of context parallelism: their keys, and the numbers that follow from them.

`cp = ulysses_degree x ring_degree`: kinds whose heads all context ranks exchange have the whole of
cp as their degree, those that exchange none have 1, the others what is set.
`config/rules/context.py` says what must hold.
"""

from __future__ import annotations

from math import lcm
from typing import Any

from echelon.config.cluster.settings import cluster_of
from echelon.config.view import Unavailable, View
from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.cluster import fast_domain
from echelon.core.plan import Context
from echelon.core.rules import nearest_divisors

CP_KEY, KIND_KEY, DEGREE_KEY = "mesh.cp", "context.kind", "context.ulysses_degree"
LENGTH_KEY, ATTENTION_KEY = "batch.sequence_length", "context.attention"


def read_context(view: View) -> tuple[Context, dict[str, tuple[object, str]]]:
    """Return how context ranks meet, and value and source of the degree where it was left to us."""
    kind, (degree, source) = view.word(KIND_KEY), ulysses_degree(view)
    derived: dict[str, tuple[object, str]] = {}
    if view.entry(DEGREE_KEY).value == "auto":
        derived[DEGREE_KEY] = degree, source
    attention: Any = view.word(ATTENTION_KEY)
    return Context(kind=kind, ulysses_degree=degree, attention=attention), derived


def ulysses_degree(view: View) -> tuple[int, str]:
    """Return how many ranks exchange heads, and why; Unavailable where it does not divide cp."""
    kind, cp = view.word(KIND_KEY), view.integer(CP_KEY)
    if cp == 1:
        return 1, "derived: a sequence is not cut, mesh.cp = 1"
    exchange = CONTEXT_KINDS[kind].exchange
    if exchange == "all":
        return cp, f"derived: {kind} exchanges heads among all of mesh.cp"
    if exchange == "none":
        return 1, f"derived: {kind} exchanges no heads"
    degree = view.entry(DEGREE_KEY).value
    if not isinstance(degree, int):
        return automatic_degree(view, cp)
    if cp % degree:
        raise Unavailable(DEGREE_KEY)
    return degree, view.entry(DEGREE_KEY).source


def automatic_degree(view: View, cp: int) -> tuple[int, str]:
    """Return the largest proper divisor of cp that divides heads and stays on a node."""
    tp, heads = view.integer("mesh.tp"), query_heads(view)
    cluster = cluster_of(view)
    node = fast_domain(cluster) if cluster.links else cluster.devices_per_node
    where = "a node" if node == cluster.devices_per_node else "the fast links"
    why = f"divides {heads} heads of a tensor rank and stays on {where} of {node} devices"
    for degree in reversed(nearest_divisors(cp, cp, limit=cp)):
        if 1 < degree < cp and heads % degree == 0 and node % (degree * tp) == 0:
            return degree, f"derived: the largest proper divisor of cp {cp} that {why}"
    return 1, f"derived: no proper divisor of cp {cp} {why}"


def exchanging_ranks(view: View) -> int:
    """Return among how many ranks heads must be shared out, whatever tp is; 1 where that is free.

    A degree that is left to us is chosen to fit the heads.
    """
    kind, degree = view.word(KIND_KEY), view.entry(DEGREE_KEY).value
    exchange = CONTEXT_KINDS[kind].exchange
    if exchange == "all":
        return view.integer(CP_KEY)
    return degree if exchange == "inner" and isinstance(degree, int) else 1


def query_heads(view: View) -> int:
    """Return the query heads of one tensor rank; Unavailable where they do not come out."""
    heads, tp = view.integer("model.heads"), view.integer("mesh.tp")
    if heads % tp:
        raise Unavailable("mesh.tp")
    return heads // tp


def ring_degree(view: View) -> int:
    """Return how many places a ring has."""
    return view.integer(CP_KEY) // ulysses_degree(view)[0]


def pieces_of_sequence(view: View) -> int:
    """Return what must divide a sequence so that each context rank gets an equal part."""
    cp, ring = view.integer(CP_KEY), ring_degree(view)
    return lcm(cp, CONTEXT_KINDS[view.word(KIND_KEY)].chunks(ring))


def pieces_with_tensor_ranks(view: View) -> int:
    """Return what must divide a sequence where tensor ranks may cut each part of it again."""
    tp = view.integer("mesh.tp") if view.flag("mesh.sequence_parallel") else 1
    return lcm(pieces_of_sequence(view), view.integer(CP_KEY) * tp)


def cuts_sequence(view: View) -> bool:
    """Return whether every context rank gets an equal part of a sequence."""
    return view.integer(LENGTH_KEY) % pieces_of_sequence(view) == 0


def cuts_groups(view: View) -> bool:
    """Return whether groups that exchange heads are equal parts of the context ranks."""
    cp, kind, degree = view.integer(CP_KEY), view.word(KIND_KEY), view.entry(DEGREE_KEY).value
    kind_record = CONTEXT_KINDS[kind]
    unread = not view.is_resolved and (cp == 1 or kind_record.exchange == "none")
    if unread or not isinstance(degree, int):
        return True
    return degree == kind_record.exchange_degree(cp, degree) and cp % degree == 0


def cuts_heads(view: View) -> bool:
    """Return whether every rank of an exchange gets an equal share of the query heads."""
    return query_heads(view) % ulysses_degree(view)[0] == 0
