# SPDX-License-Identifier: Apache-2.0
"""In which order a plan adds up what one process adds up at once.

Floating-point sums depend on their order: this is why a split run differs from one process in the
last bits, and by how much is a matter of the precision. The order of sums over ranks is that of
`docs/decisions/009-order-of-reduction.md`.
"""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.plan import Plan


def reduction_order(plan: Plan) -> tuple[str, ...]:
    """Return the sums that a plan cuts into parts, each with the order of its parts."""
    return (*_inside_blocks(plan), *_gradients(plan)) or ("nothing: as in one process",)


def _inside_blocks(plan: Plan) -> Iterator[str]:
    mesh, layout = plan.mesh, plan.layout
    if mesh.tp > 1:
        how = "reduce-scatter" if layout.sequence_parallel else "all-reduce"
        yield f"outputs of row-parallel layers: parts of {mesh.tp} tensor ranks ({how})"
    if mesh.cp > 1:
        kind = CONTEXT_KINDS[layout.context.kind]
        degree = mesh.cp // kind.exchange_degree(mesh.cp, layout.context.ulysses_degree)
        if degree > 1 and not kind.gathers_keys:
            yield f"attention: {degree} blocks of keys, its own first, joined by their log-sum-exp"
        elif degree > 1:
            yield f"gradients of keys and values: parts of {degree} context ranks (reduce-scatter)"
    if mesh.ep > 1:
        yield "weights of experts: rows of all ranks that sent them, rank after rank"


def _gradients(plan: Plan) -> Iterator[str]:
    """Yield what adds up to a gradient of weights, from the inside."""
    mesh, zero = plan.mesh, plan.layout.zero
    parts: list[str] = []
    slices = zero.stage > 0 and zero.accumulate == "slices"
    microbatches = f"{plan.num_microbatches} microbatches in the order of backward"
    if plan.num_microbatches > 1 and not slices:
        parts.append(microbatches)
    shards = mesh.dp_shard * mesh.cp
    readers = "context ranks" if mesh.cp > 1 else "data ranks"
    if mesh.cp > 1 and shards * mesh.dp_replicate > mesh.cp:
        readers = "data and context ranks"
    if mesh.servers:
        parts.append(f"{mesh.num_workers} workers, one after the other, on each server")
    elif zero.stage and shards > 1:
        parts.append(f"{shards} {readers} (reduce-scatter)")
    elif shards * mesh.dp_replicate > 1 and not zero.stage:
        parts.append(f"{shards * mesh.dp_replicate} {readers} (all-reduce)")
    if slices and plan.num_microbatches > 1:
        parts.append(microbatches)
    if zero.stage and mesh.dp_replicate > 1:
        parts.append(f"{mesh.dp_replicate} replicas (all-reduce)")
    if parts:
        yield f"gradients of weights: {', then '.join(parts)}"
