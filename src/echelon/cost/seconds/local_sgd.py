# SPDX-License-Identifier: Apache-2.0
"""Seconds of local SGD: what a mean step waits for islands, and the outer steps themselves.

A round of H steps sends the slices of a rank once over `dp_replicate`, whose groups are the
outermost: a fragment of P at a time. Without delay a step waits for its fragment; with a delay of d
steps it travels behind d times all else that a step takes, and what is left shows:

    P max(0, t_fragment - d t_step) / H

The outer step reads and writes outer parameters, momentum and values: six numbers a weight.
"""

from __future__ import annotations

import numpy as np

from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.inputs.group_links import library_group_links, pairwise_group_links
from echelon.cost.inputs.numbers import Num
from echelon.cost.seconds.data import HeldWeights
from echelon.cost.seconds.links.collectives import all_gather_seconds, sum_seconds
from echelon.cost.seconds.matmul import memory_seconds

_NUMBERS_MOVED = 6.0  # of 4 bytes, a weight


def outer_seconds(work: CostInputs, held: HeldWeights, step_s: Num) -> Num:
    """Return what meetings add to a mean step, all else of which takes `step_s`."""
    layout = work.layout
    cut = np.asarray(layout.zero) >= 1.0
    shared = (held.blocks + held.ends) / np.where(cut, layout.shard, 1.0)
    weights = shared + held.routed / np.where(cut, layout.expert_shard, 1.0)
    inner = layout.tp * layout.shard * layout.pp
    size = layout.outer_bytes * weights / layout.fragments
    summed = sum_seconds(library_group_links(work, layout.dp_replicate, inner), size, layout.sums)
    gathered = all_gather_seconds(
        pairwise_group_links(work, layout.dp_replicate, inner), layout.dp_replicate * size
    )
    travels = work.software.pace * np.where(
        np.asarray(layout.outer_gathers) > 0.0, gathered, summed
    )
    shown = layout.fragments * np.maximum(0.0, travels - layout.delay * step_s)
    updates = memory_seconds(work.machine, 4.0 * _NUMBERS_MOVED * weights)
    rounds = np.where(layout.apart, np.maximum(layout.round_steps, 1.0), 1.0)
    return np.where(layout.apart, (shown + work.software.pace * updates) / rounds, 0.0)
