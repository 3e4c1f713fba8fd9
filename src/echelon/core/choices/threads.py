# SPDX-License-Identifier: Apache-2.0
"""Replicas of a module on threads of one process, and which rows of a batch each takes.

Named after `torch.nn.DataParallel`, which has the same seven steps: scatter the batch, replicate
the module, forward in threads, gather the outputs, the loss on the primary, backward in threads,
sum of the gradients onto the primary. The first replica is the primary, which is the module itself;
what the others hold lasts for a step.
"""

from __future__ import annotations

THREADS_AXIS = "threads"
"""Under which axis events and formulas have what goes through the primary."""


def replica_rows(rows: int, replicas: int) -> tuple[int, ...]:
    """Return how many of `rows` each replica takes that has any, the primary first.

    All but the last take as many, as `torch.chunk` cuts: 10 rows for 4 are 3, 3, 3, 1, and 5 are 2,
    2, 1, with a replica that has none. No rows are the primary's.
    """
    each = -(-rows // replicas)
    if not each:
        return (0,)
    return tuple(min(each, rows - first) for first in range(0, rows, each))
