# SPDX-License-Identifier: Apache-2.0
"""The highest moment of the primary of a model on threads: that of one replica, and the others'.

Each replica does what one process does with its part of a microbatch. Where they share a memory
all of their activations are there together, if they come to their highest operators at the same
time: threads are not in step, so this is the most. Where each has a GPU, the primary has its own,
and one bucket of another's gradients while they are summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from echelon.core.choices.threads import Threads
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.layout.buckets import plan_buckets
from echelon.layout.stage import part_of

SHARED_TERMS = ("activations", "buffers")
"""Terms of which every replica has its own in a memory that all of them share."""


def share_of_replica(plan: Plan) -> Plan:
    """Return what one replica does of a plan, as the plan of one process."""
    replicas = plan.layout.threads.replicas
    each = plan.layout.microbatch_sequences // replicas
    numbers = plan.mathematics
    return replace(
        plan,
        mathematics=replace(numbers, global_sequences=numbers.global_sequences // replicas),
        layout=replace(plan.layout, microbatch_sequences=each, threads=Threads()),
    )


def with_other_replicas(
    plan: Plan, rank: int, alone: Mapping[str, float], resting: Mapping[str, float]
) -> dict[str, float]:
    """Return the terms of a peak with all replicas: `alone` of one, `resting` of the whole plan."""
    terms = dict(alone)
    replicas = plan.layout.threads.replicas
    if plan.cluster.backend == "nccl":
        precision = plan.mathematics.precision
        largest = max(one.num_elements for one in plan_buckets(plan, part_of(plan, rank)))
        terms["buffers"] += largest * DTYPE_BYTES[precision.gradients]
    else:
        for name in SHARED_TERMS:
            terms[name] *= replicas
    for name in ("parameters", "gradients"):
        terms[name] = resting[name]
    return terms
