# SPDX-License-Identifier: Apache-2.0
"""Rules of a rehearsal: what NCCL asks of the order of the ranks' calls, and of their memory."""

from echelon.core.rules import Rule

REHEARSE_DEADLOCK = Rule(
    id="rehearse-deadlock",
    why="""
    A collective of NCCL runs when all members have come to it, behind the one before it on its
    communicator; the stream that computes waits where its rank said so, and the host waits in the
    first call of a communicator and where it reads from the device. If these waits form a circle,
    each of its ranks waits for the next one and none ever goes on.
    """,
    bad="rank 0: send to 1, then open the group of both; rank 1: open the group, then receive",
    fixed="every rank opens its groups at the start, in one order",
)

REHEARSE_MISMATCH = Rule(
    id="rehearse-mismatch",
    why="""
    NCCL has no tags: the first call of each member on a communicator is one operation, the second
    the next. Calls of other kinds, of other sizes or of other dtypes under one number are written
    into each other's memory, or never end.
    """,
    bad="rank 0: all_reduce(a), all_reduce(b); rank 1: all_reduce(b), all_reduce(a)",
    fixed="both: all_reduce(a), all_reduce(b)",
)

REHEARSE_MISSING = Rule(
    id="rehearse-missing",
    why="""
    Every member of a communicator makes every call on it. The others wait for one that makes fewer
    until the watchdog of NCCL ends the run.
    """,
    bad="if rank == 0: group.all_reduce(x, name='x')",
    fixed="group.all_reduce(x, name='x')",
)

REHEARSE_MISSING_WAIT = Rule(
    id="rehearse-missing-wait",
    why="""
    A collective runs beside the computation from its issue to its wait. What reads its result
    before, or writes what it reads or fills, races with it: right on an idle machine, wrong on a
    busy one.
    """,
    bad="pending = group.all_gather(whole, part, name='w', async_op=True); y = x @ whole",
    fixed="pending = group.all_gather(whole, part, name='w', async_op=True); pending.wait(); "
    "y = x @ whole",
)

REHEARSE_RELEASED_IN_FLIGHT = Rule(
    id="rehearse-released-in-flight",
    why="""
    Memory that a collective reads or fills is its own until the wait. The allocator of a GPU gives
    what is released to the next one that asks, at once.
    """,
    bad="pending = group.all_gather(whole, part, name='w', async_op=True); memory.release()",
    fixed="pending = group.all_gather(whole, part, name='w', async_op=True); pending.wait(); "
    "memory.release()",
)

REHEARSE_NEVER_AWAITED = Rule(
    id="rehearse-never-awaited",
    why="""
    A step ends when all that it has begun has been awaited, but for parameters that are gathered
    for the next one. What nobody waits for may still be under way when its memory is used again.
    """,
    bad="group.all_reduce(gradients, name='g', async_op=True)",
    fixed="pending = group.all_reduce(gradients, name='g', async_op=True); ...; pending.wait()",
)

REHEARSE_HOST_READ = Rule(
    id="rehearse-host-read",
    why="""
    A GPU is kept busy by a host that runs ahead of it. Where the host reads a number from the
    device in the middle of a schedule, it waits for all that it has given the device, and the
    device then waits for the host. Sizes that follow from the routing of tokens are the one thing
    that a host has to read: without a capacity nothing else knows them.
    """,
    bad="if mask.any(): x = x[mask]",
    fixed="x = x.masked_fill(~mask, 0.0)",
)

REHEARSE_CLASS = Rule(
    id="rehearse-class",
    why="""
    Ranks that differ in their samples, columns or slices only are rehearsed once for all of them.
    Some of the others are rehearsed, too, and must do the very same. One that does not means that
    the ranks which were not rehearsed are not known.
    """,
    bad="if rank == 5: group.all_reduce(x, name='x')",
    fixed="group.all_reduce(x, name='x')",
)
