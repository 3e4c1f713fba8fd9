"""Bytes of the fullest rank by closed forms, with what our trainer has beside what others have.

Where gradients of microbatches add up in slices (ZeRO 2 and 3), our trainer fills whole buckets of
them, one for each update rule, while the sums of two more travel (`cost/transient.py`); at stage 3
a bucket is a unit, and of experts it is large at stage 2 too.
"""

from __future__ import annotations

import numpy as np

from echelon.cost.lattice.block import Work
from echelon.cost.lattice.memory import bytes_of_rank
from echelon.cost.lattice.terms import Terms
from echelon.cost.lattice.weights import block_weights
from echelon.cost.transient import BUCKETS_IN_FLIGHT

OURS = "echelon"
"""The trainer whose facts are those of our own engine."""


def closed_bytes(work: Work, trainer: str = OURS) -> Terms:
    """Return what the fullest rank of a plan of a trainer holds at its peak."""
    found = bytes_of_rank(work)
    if trainer != OURS or not np.any(np.asarray(work.layout.zero) >= 2.0):
        return found
    expert = np.any(np.asarray(work.model.experts) > 0.0)
    blocks = block_weights(work.model, work.layout, mixture=bool(expert))
    layout, each = work.layout, work.software.gradient_bytes
    # What is whole counts beside the unit that closed forms have for every trainer at stage 3.
    routed = (BUCKETS_IN_FLIGHT + 2.0) * blocks.routed
    shared = np.where(np.asarray(layout.zero) >= 3.0, BUCKETS_IN_FLIGHT * blocks.shared, 0.0)
    alone = np.asarray(layout.shard) <= 1.0
    sums = np.where((np.asarray(layout.zero) >= 2.0) & ~alone, each * (routed + shared), 0.0)
    slack = work.software.slack * sums
    terms = dict(found.terms)
    return Terms(
        terms=terms | {"buffers": terms["buffers"] + sums, "slack": terms["slack"] + slack}
    )
