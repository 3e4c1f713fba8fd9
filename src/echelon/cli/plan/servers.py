# SPDX-License-Identifier: Apache-2.0
"""The part of `echelon plan` about parameter servers: what each holds, and what goes through it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from echelon.core.plan import Plan
from echelon.core.units import binary_bytes, decimal_bytes
from echelon.cost.bytes.held import bytes_held
from echelon.cost.bytes.sent import bytes_sent
from echelon.cost.bytes.servers import through_server
from echelon.planner.view.text_layout import table

MOST_SHOWN = 8  # servers


def count_text(count: int, what: str) -> str:
    """Return a number of things, one or more."""
    return f"{count} {what}{'s' * (count != 1)}"


def updates_text(plan: Plan) -> str:
    """Return when servers update."""
    updates, workers = plan.mathematics.updates, plan.mesh.num_workers
    if not updates.is_asynchronous:
        return "synchronous: one update with the mean of the global batch"
    if not updates.applies_each:
        return "asynchronous with max_staleness 0: the bits of synchronous servers"
    damping = f", rate / (1 + staleness)^{updates.damping:g}" * (updates.damping > 0)
    return (
        f"asynchronous: at most {updates.max_staleness} steps ahead of the slowest, so gradients "
        f"at most {updates.most_stale(workers)} updates stale{damping}"
    )


def servers_json(plan: Plan) -> list[dict[str, Any]]:
    """Return what each server holds and sends, and the bytes of the model that go through it."""
    return [
        {
            "server": server,
            "rank": rank,
            "held": [asdict(term) for term in bytes_held(plan, rank)],
            "sent_bytes_per_step": [
                {**asdict(term), "bytes": term.bytes} for term in bytes_sent(plan, rank)
            ],
            "model_bytes_through_it_per_step": through_server(plan, server),
        }
        for server, rank in enumerate(plan.mesh.server_ranks)
    ]


def server_parts(plan: Plan, *, columns: int) -> Iterator[str]:
    """Yield what servers hold between steps, and what goes through each in a step."""
    if not plan.mesh.servers:
        return
    shown = [*enumerate(plan.mesh.server_ranks)][:MOST_SHOWN]
    kinds = [*dict.fromkeys(term.name for _, rank in shown for term in bytes_held(plan, rank))]
    cells: list[tuple[object, ...]] = []
    for server, rank in shown:
        held = {term.name: term.bytes for term in bytes_held(plan, rank)}
        cells.append(
            (
                server,
                rank,
                *(binary_bytes(held.get(kind, 0)) for kind in kinds),
                binary_bytes(sum(held.values())),
                decimal_bytes(through_server(plan, server)),
            )
        )
    more = plan.mesh.servers - len(shown)
    yield (
        "Each parameter server holds between steps, and has pass through its link in a step (all "
        "gradients in, all parameters out: W workers x its range x (g + p) bytes):\n\n"
        + table(("server", "rank", *kinds, "together", "through it"), cells, columns)
        + (f"\n\nand {count_text(more, 'server')} more like these" if more else "")
    )
