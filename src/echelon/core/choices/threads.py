# SPDX-License-Identifier: Apache-2.0
"""Replicas of a model on threads of one process, and what a plan must be for them.

Named after `torch.nn.DataParallel`, which has the same seven steps: scatter the batch, replicate
the module, forward in threads, gather the outputs, the loss on the primary, backward in threads,
sum of the gradients onto the primary. The first replica is the primary: it alone has optimizer
state, and what the others hold lasts for a step.
"""

from __future__ import annotations

from dataclasses import dataclass

THREADS_AXIS = "threads"
"""Under which axis events and formulas have what goes through the primary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """Say on how many threads of its process the model is replicated; 1 replicates nothing.

    A microbatch is scattered evenly: replica i has sequences i b/N to (i+1) b/N of its b. Replicas
    are on the first N GPUs of the host, or on its CPU.
    """

    replicas: int = 1

    @property
    def on(self) -> bool:
        """Return whether there is more than the primary."""
        return self.replicas > 1


def replica_rows(rows: int, replicas: int) -> tuple[int, ...]:
    """Return how many of `rows` each replica takes that has any, the primary first.

    All but the last take as many, as `torch.chunk` cuts: 10 rows for 4 are 3, 3, 3, 1, and 5 are 2,
    2, 1, with a replica that has none. No rows are the primary's.
    """
    each = -(-rows // replicas)
    if not each:
        return (0,)
    return tuple(min(each, rows - first) for first in range(0, rows, each))
