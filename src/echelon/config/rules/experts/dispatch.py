# SPDX-License-Identifier: Apache-2.0
"""How tokens travel to their experts: what must hold of two hops, chunks and padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import gcd

from echelon.config.cluster.settings import cluster_of
from echelon.config.rules.suggestions import near_divisors, setting_changes
from echelon.config.rules.violations import RuleViolation, setting_without_effect
from echelon.config.settings.experts import (
    CAPACITY_KEY,
    COUNT_KEY,
    DROPLESS,
    EP_KEY,
    EXPERT_TP_KEY,
    TP_KEY,
    capacity_factor,
    fold_degree,
    ranks_with_the_same_experts,
    require_experts,
    tokens_of_microbatch,
)
from echelon.config.view import Unavailable, View, mesh_of
from echelon.core.mesh import Mesh
from echelon.core.rulebook.experts import (
    CHUNKS_DIVIDE_TOKENS,
    PADDED_NEEDS_CAPACITY,
    PADDED_TRAVELS_FLAT,
    TWO_HOP_NEEDS_NODES,
)

DISPATCH_KEY, CHUNKS_KEY, PADDED_KEY = "experts.dispatch", "experts.chunks", "experts.padded"
TWO_HOP = "two-hop"


def padding_violations(view: View) -> Iterator[RuleViolation]:
    """Find padding without a size to pad to, and padding of what travels in two hops."""
    require_experts(view)
    if not view.flag(PADDED_KEY):
        return
    if capacity_factor(view) is None:
        yield RuleViolation(
            rule=PADDED_NEEDS_CAPACITY,
            key=PADDED_KEY,
            message=f'{PADDED_KEY} = true, but {CAPACITY_KEY} = "{DROPLESS}" has no size to pad to',
            set_by=(PADDED_KEY, CAPACITY_KEY),
            suggestions=({CAPACITY_KEY: 1.25}, {PADDED_KEY: False}),
        )
    if view.word(DISPATCH_KEY) == TWO_HOP:
        yield RuleViolation(
            rule=PADDED_TRAVELS_FLAT,
            key=PADDED_KEY,
            message=f'{PADDED_KEY} = true with {DISPATCH_KEY} = "two-hop": what crosses between '
            "nodes follows from the routing, and has no fixed size",
            set_by=(PADDED_KEY, DISPATCH_KEY),
            suggestions=({DISPATCH_KEY: "flat"}, {PADDED_KEY: False}),
        )


def two_hop_violations(view: View) -> Iterator[RuleViolation]:
    """Find two hops where there is nothing to cross, or nothing to hand on."""
    require_experts(view)
    if view.word(DISPATCH_KEY) != TWO_HOP:
        return
    ranks_with_the_same_experts(view)  # Without whole groups there are no nodes to look at.
    node = cluster_of(view).devices_per_node
    why = two_hop_obstacle(mesh_of(view), view.integer(EXPERT_TP_KEY), node)
    if why:
        both = gcd(view.integer(COUNT_KEY), fold_degree(view))
        degrees = near_divisors(both, view.integer(EP_KEY))
        yield RuleViolation(
            rule=TWO_HOP_NEEDS_NODES,
            key=DISPATCH_KEY,
            message=f'{DISPATCH_KEY} = "two-hop", but {why}',
            set_by=(DISPATCH_KEY, EP_KEY),
            suggestions=(setting_changes(EP_KEY, degrees), {DISPATCH_KEY: "flat"}),
        )


def two_hop_obstacle(mesh: Mesh, pieces: int, node: int) -> str:
    """Return why two hops make no sense over the expert groups of a mesh; nothing where they do."""
    if mesh.ep == 1:
        return f"{EP_KEY} = 1 sends nothing"
    for group in mesh.expert_groups(expert_tp=pieces):
        ranks = f"the {mesh.ep} ranks from {group[0]} to {group[-1]} that share out experts"
        on_node = Counter(rank // node for rank in group)
        if len(on_node) == 1:
            return f"{ranks} are on one node of {node} devices"
        if len(set(on_node.values())) > 1:
            counts = " + ".join(map(str, on_node.values()))
            return f"{ranks} are spread unevenly over nodes of {node} devices: {counts}"
        if len(on_node) == mesh.ep:
            return f"of {ranks} each is on a node of its own: there is no second hop"
    return ""


def chunk_violations(view: View) -> Iterator[RuleViolation]:
    """Find chunks of unequal size, or of what does not travel."""
    require_experts(view)
    count = view.integer(CHUNKS_KEY)
    if view.integer(EP_KEY) == 1:
        yield from setting_without_effect(view, CHUNKS_KEY, f"tokens do not travel, {EP_KEY} = 1")
        return
    tokens = tokens_of_microbatch(view)
    parts = view.integer(TP_KEY) if view.integer(EXPERT_TP_KEY) == 1 else 1
    if tokens % parts:
        raise Unavailable(TP_KEY)
    rows = tokens // parts
    if rows % count:
        how = f"the {tokens} tokens of a microbatch"
        if parts > 1:
            how = f"{tokens} tokens of a microbatch / tp = {tokens} / {parts} = {rows}"
        yield RuleViolation(
            rule=CHUNKS_DIVIDE_TOKENS,
            key=CHUNKS_KEY,
            message=f"{CHUNKS_KEY} = {count}, but a rank sends {how} to experts "
            f"({rows} % {count} = {rows % count})",
            set_by=(CHUNKS_KEY, "batch.microbatch_sequences", "batch.sequence_length", TP_KEY),
            suggestions=(setting_changes(CHUNKS_KEY, near_divisors(rows, count)),),
        )


DISPATCH_FINDERS = (padding_violations, two_hop_violations, chunk_violations)
