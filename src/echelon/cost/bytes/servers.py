# SPDX-License-Identifier: Apache-2.0
"""Bytes of parameter servers: what each worker and each server sends in a step, and holds.

G is the elements of all buckets (padding included), G_s those that server s holds: G / S, up to one
element. W is the workers, g the bytes of a gradient as it is sent, p those of a parameter.

    a worker sends       G g                 its gradients, a range to each server
    server s sends       W G_s p             its range of the parameters, to each worker
    through server s     W G_s (g + p)       in and out: 2 W model / S where g = p

Beside these there are 8 bytes from every rank to every other, before backward: how many tokens it
has. No server sends another any of the model; what its gradients add to the norm is a number in the
row that all ranks exchange (`world_bytes` in `cost/bytes/sent.py`).

Asynchronous servers exchange nothing with all ranks. A worker says which step begins and ends, in
48 bytes to each server, and is answered in 24; with a bound of 0 servers tell one another 8 bytes
of the norm.

Source: Li et al., Scaling Distributed Machine Learning with the Parameter Server, 2014, section 4.
"""

from __future__ import annotations

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.data import COUNT_BYTES
from echelon.cost.bytes.terms import HeldTerm, SentTerm, all_gather_bytes
from echelon.layout.slots import plan_server_ranges, served_buckets, server_elements, server_of_rank

SERVERS_AXIS = "servers"
"""Workers and servers: gradients one way, parameters the other."""

TO_WORKERS_TERM = "parameters to workers"
"""Name of the term of what servers send back: nothing in a step that updates nothing."""

NUMBERS_BYTES = 3 * 8
"""Numbers of an asynchronous message without elements (`parallel/servers.py`)."""

NORM_BYTES = 8
"""What an asynchronous server tells the others of the norm of a sum."""

_SOURCE = "Li et al., Parameter Server, 2014, section 4"


def server_bytes(plan: Plan, rank: int) -> tuple[SentTerm, ...]:
    """Return what `rank`, a worker or a server, sends over the axis "servers" in a step."""
    precision, server = plan.mathematics.precision, plan.mesh.is_server(rank)
    apart = plan.mathematics.updates.is_asynchronous
    count = _numbers(plan, server=server) if apart else _token_count(plan)
    if server:
        held = server_elements(plan, server_of_rank(plan, rank))
        return (
            SentTerm(
                axis=SERVERS_AXIS,
                name=TO_WORKERS_TERM,
                count=plan.mesh.num_workers,
                each=held * DTYPE_BYTES[precision.parameters],
                formula="G/S p, to each worker",
                source=_SOURCE,
            ),
            count,
        )
    whole = sum(bucket.num_elements for bucket in served_buckets(plan))
    return (
        SentTerm(
            axis=SERVERS_AXIS,
            name="gradients to servers",
            each=whole * DTYPE_BYTES[precision.reduction],
            formula="G g, a range to each server",
            source=_SOURCE,
        ),
        count,
    )


def _token_count(plan: Plan) -> SentTerm:
    return SentTerm(
        axis=SERVERS_AXIS,
        name="token count",
        each=all_gather_bytes(COUNT_BYTES, plan.mesh.world_size),
        formula="(W + S - 1) x 8",
        source="the loss has one denominator, known before backward",
    )


def _numbers(plan: Plan, *, server: bool) -> SentTerm:
    """Return what an asynchronous rank says beside ranges: three numbers at a time."""
    mesh = plan.mesh
    joint = server and not plan.mathematics.updates.applies_each
    norms = all_gather_bytes(NORM_BYTES, mesh.servers) if joint else 0
    times = mesh.num_workers if server else 2 * mesh.servers
    return SentTerm(
        axis=SERVERS_AXIS,
        name="clocks and versions",
        each=times * NUMBERS_BYTES + norms,
        formula="W x 24" + " + (S - 1) x 8" * joint if server else "S x 48",
        source="Ho et al., Stale Synchronous Parallel, 2013",
    )


def through_server(plan: Plan, server: int) -> int:
    """Return the bytes of the model that go into and out of one server in a step."""
    precision = plan.mathematics.precision
    each = DTYPE_BYTES[precision.reduction] + DTYPE_BYTES[precision.parameters]
    return plan.mesh.num_workers * server_elements(plan, server) * each


def held_by_server(plan: Plan, rank: int) -> tuple[HeldTerm, ...]:
    """Return the model state of a server: its ranges, their gradients, and optimizer state."""
    precision, server = plan.mathematics.precision, server_of_rank(plan, rank)
    elements = server_elements(plan, server)
    states = sum(
        len(OPTIMIZERS[bucket.update].state) * len(ranges[server])
        for bucket, ranges in zip(served_buckets(plan), plan_server_ranges(plan), strict=True)
    )
    kinds = [
        ("parameters", elements, precision.parameters),
        ("gradients", elements, precision.gradients),
        ("master parameters", elements * precision.has_master, precision.master),
        ("optimizer state", states, precision.master),
    ]
    return tuple(
        HeldTerm(
            name=name, bytes=count * DTYPE_BYTES[dtype], formula=f"{count:,} x {DTYPE_BYTES[dtype]}"
        )
        for name, count, dtype in kinds
        if count
    )
