"""Bytes of the fullest rank by closed forms, with what our trainer has beside what others have.

Where gradients of microbatches add up in slices (ZeRO 2 and 3), our trainer fills whole buckets of
them, one for each update rule, while the sums of two more travel (`cost/transient.py`); at stage 3
a bucket is a unit, and of experts it is large at stage 2 too.
"""

from __future__ import annotations

import numpy as np

from echelon.cost.lattice.block import Work
from echelon.cost.lattice.memory import bytes_of_rank
from echelon.cost.lattice.numbers import Num
from echelon.cost.lattice.terms import Terms
from echelon.cost.lattice.weights import block_weights, embedding_weights, head_weights
from echelon.cost.transient import BUCKETS_IN_FLIGHT

OURS = "echelon"
"""The trainer whose facts are those of our own engine."""
STATES_ON_DEVICE = 2.0
"""Buckets of offloaded state on a device at once: `zero.offload_buffers` where nobody says more."""


def closed_bytes(work: Work, trainer: str = OURS) -> Terms:
    """Return what the fullest rank of a plan of a trainer holds at its peak."""
    found = bytes_of_rank(work)
    layout = work.layout
    sums = np.any(np.asarray(layout.zero) >= 2.0)
    travels = np.any(np.asarray(layout.offload) > 0.0)
    if trainer != OURS or not (sums or travels):
        return found
    more: Num = _whole_sums(work) if sums else 0.0
    more = more + (_travelling_state(work) if travels else 0.0)
    slack = work.software.slack * more
    terms = dict(found.terms)
    return Terms(
        terms=terms | {"buffers": terms["buffers"] + more, "slack": terms["slack"] + slack}
    )


def _whole_sums(work: Work) -> Num:
    """Return the bytes of gradients that are whole while they are added up in slices."""
    expert = np.any(np.asarray(work.model.experts) > 0.0)
    blocks = block_weights(work.model, work.layout, mixture=bool(expert))
    layout, each = work.layout, work.software.gradient_bytes
    # What is whole counts beside the unit that closed forms have for every trainer at stage 3.
    routed = (BUCKETS_IN_FLIGHT + 2.0) * blocks.routed
    shared = np.where(np.asarray(layout.zero) >= 3.0, BUCKETS_IN_FLIGHT * blocks.shared, 0.0)
    alone = np.asarray(layout.shard) <= 1.0
    return np.where((np.asarray(layout.zero) >= 2.0) & ~alone, each * (routed + shared), 0.0)


def _travelling_state(work: Work) -> Num:
    """Return the bytes of optimizer state that is on its way from the host or back.

    A bucket is a block, its routed experts, or an end of the model: whatever is more than
    `zero.bucket_bytes`; two of them are on the device.
    """
    model, layout = work.model, work.layout
    dense = block_weights(model, layout, mixture=False)
    expert = block_weights(model, layout, mixture=True)
    ends = np.maximum(embedding_weights(model, layout), head_weights(model, layout))
    shared = np.maximum(np.maximum(dense.shared, expert.shared), ends)
    inner = layout.ep * layout.expert_tp
    cut = np.maximum(1.0, layout.tp * layout.shard / inner)
    largest = np.maximum(shared / layout.shard, expert.routed / cut)
    each = STATES_ON_DEVICE * work.software.state_bytes * largest
    return np.where(np.asarray(layout.offload) > 0.0, each, 0.0)
