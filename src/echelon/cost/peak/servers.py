# SPDX-License-Identifier: Apache-2.0
"""The most that a parameter server holds at one time: model state, and what workers are sending.

While it adds up a bucket, those of two more are arriving: of each bucket every worker sends the
range of the server, in the dtype of the reduction. Later an update casts gradients, a bounded
number at a time, where the master copy has another dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.servers import held_by_server
from echelon.cost.bytes.terms import WIDE_BYTES
from echelon.cost.bytes.transient import BUCKETS_IN_FLIGHT
from echelon.cost.peak.update import UPDATE_ELEMENTS
from echelon.layout.servers import plan_server_ranges, server_of_rank


def server_peak_buffers(plan: Plan, rank: int) -> tuple[int, str]:
    """Return the most bytes beside the model state of a server, and when that is."""
    precision, server = plan.mathematics.precision, server_of_rank(plan, rank)
    sizes = [len(ranges[server]) for ranges in plan_server_ranges(plan)]
    window = BUCKETS_IN_FLIGHT + 1
    arriving = max(sum(sizes[place : place + window]) for place in range(len(sizes)))
    received = plan.mesh.num_workers * arriving * DTYPE_BYTES[precision.reduction]
    longest = min(UPDATE_ELEMENTS, max(sizes))
    squares = longest * WIDE_BYTES * (DTYPE_BYTES[precision.gradients] < WIDE_BYTES)
    casts = precision.gradients != precision.master
    update = max(casts * longest * DTYPE_BYTES[precision.master], squares)
    return (received, "the sums of gradients") if received >= update else (update, "update")


def server_terms(plan: Plan, rank: int, kinds: Mapping[str, str]) -> dict[str, float]:
    """Return the model state of a server by the terms that `kinds` names."""
    found: dict[str, float] = {}
    for term in held_by_server(plan, rank):
        kind = kinds[term.name]
        found[kind] = found.get(kind, 0.0) + term.bytes
    return found
