# SPDX-License-Identifier: Apache-2.0
"""Who holds what where parameter servers keep the model: a range of every bucket on each server.

Each bucket is cut into as many ranges as there are servers, so all servers have work while one
bucket travels. What a cut leaves over goes to the servers in turn: of N elements of all buckets
server s has floor((N + S - 1 - s) / S), so no two servers differ by more than one element.

Source: Li et al., Scaling Distributed Machine Learning with the Parameter Server, 2014, section 4.2
(ranges of keys).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from echelon.core.plan import Plan
from echelon.layout.buckets import BucketPlan, plan_buckets
from echelon.layout.stage import part_of

BucketRanges = tuple[range, ...]
"""The range of one bucket on each server, in the order of servers."""


def server_ranges(sizes: Sequence[int], num_servers: int) -> tuple[BucketRanges, ...]:
    """Return the ranges of buckets of these sizes: they cover each bucket once, in order."""
    found: list[BucketRanges] = []
    ends = [0, *accumulate(sizes)]
    for before, after in pairwise(ends):
        shares = [
            _share(after, server, num_servers) - _share(before, server, num_servers)
            for server in range(num_servers)
        ]
        stops = [0, *accumulate(shares)]
        found.append(tuple(range(a, b) for a, b in pairwise(stops)))
    return tuple(found)


def _share(elements: int, server: int, num_servers: int) -> int:
    return (elements + num_servers - 1 - server) // num_servers


@lru_cache(maxsize=64)
def served_buckets(plan: Plan) -> tuple[BucketPlan, ...]:
    """Return the buckets of a worker: every worker has the same, and servers hold ranges of them.

    They are in the order in which backward completes them.
    """
    return plan_buckets(plan, part_of(plan, 0))


def plan_server_ranges(plan: Plan) -> tuple[BucketRanges, ...]:
    """Return the ranges of the buckets of a plan on each of its servers."""
    sizes = [bucket.num_elements for bucket in served_buckets(plan)]
    return server_ranges(sizes, plan.mesh.servers)


def server_elements(plan: Plan, server: int) -> int:
    """Return how many elements server number `server` holds of all buckets."""
    return sum(len(ranges[server]) for ranges in plan_server_ranges(plan))


def server_of_rank(plan: Plan, rank: int) -> int:
    """Return the number of the server that `rank` is."""
    return plan.mesh.server_ranks.index(rank)
