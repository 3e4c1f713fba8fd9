"""Seconds of data parallelism: gradients' travel, gathers of ZeRO, and the update.

Without ZeRO gradients of a rank's weights are all-reduced once a step. At stages 1 and 2 they are
scattered, and parameters gathered after the update: the same bytes. At stage 3 every block's
parameters are gathered for forward and for backward, and its gradients scattered, of every
microbatch; that hides behind the compute of the blocks beside it, but for the first and the last
(Rajbhandari et al., ZeRO, 2020, section 7; Zhao et al., PyTorch FSDP, 2023, section 3.3). Hybrid
sharding adds an all-reduce of slices over dp_replicate. Experts have their own groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echelon.cost.lattice.block import Work, own_way, pair_way
from echelon.cost.lattice.numbers import Num
from echelon.cost.lattice.offload import offload_seconds
from echelon.cost.lattice.products import moved_seconds
from echelon.cost.lattice.travel import Way, gather_seconds, reduce_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Give the weights of the rank that holds most: blocks' own, of routed experts, of the ends."""

    blocks: Num
    routed: Num
    ends: Num
    layers: Num


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Give what the groups of ranks have of the links that weights are cut or repeated over.

    `shared` are those of most weights, `routed` those of routed experts: as gathers and scatters
    use them, and as an all-reduce does (`*_sum`). `replicate` repeats both.
    """

    shared: Way
    shared_sum: Way
    routed: Way
    routed_sum: Way
    replicate: Way


def ways_of(work: Work) -> Ways:
    """Return the groups over which weights are cut and repeated, and those of experts."""
    layout = work.layout
    inner = layout.ep * layout.expert_tp
    cut = np.maximum(1.0, layout.tp * layout.shard / inner)
    return Ways(
        shared=pair_way(work, layout.shard, layout.tp),
        shared_sum=own_way(work, layout.shard, layout.tp),
        routed=pair_way(work, cut, inner),
        routed_sum=own_way(work, cut, inner),
        replicate=own_way(work, layout.dp_replicate, layout.tp * layout.shard),
    )


def step_travel(work: Work, held: Held) -> tuple[Num, Num]:
    """Return the seconds of gradients' travel, and of gathers, once a step at stages 0 to 2."""
    layout, software = work.layout, work.software
    ways = ways_of(work)
    cut = np.asarray(layout.zero) >= 1.0
    shared, routed = held.blocks + held.ends, held.routed

    def reduced(way: Way, whole: Way, weights: Num) -> Num:
        size = software.reduced_bytes * weights / software.reduce_share
        across = reduce_seconds(ways.replicate, np.where(cut, size / way.degree, size))
        return np.where(cut, gather_seconds(way, size), reduce_seconds(whole, size)) + across

    def gathered(way: Way, weights: Num) -> Num:
        return np.where(cut, gather_seconds(way, work.element * weights), 0.0)

    none = np.asarray(routed) == 0.0
    reduce = reduced(ways.shared, ways.shared_sum, shared)
    reduce = reduce + np.where(none, 0.0, reduced(ways.routed, ways.routed_sum, routed))
    gather = gathered(ways.shared, shared) + np.where(none, 0.0, gathered(ways.routed, routed))
    return reduce, gather


def gather_of_unit(work: Work, shared: Num, routed: Num) -> tuple[Num, Num]:
    """Return the seconds of one gather, and of one reduce-scatter, of a block at stage 3."""
    software, ways = work.software, ways_of(work)
    size = software.reduced_bytes / software.gather_share
    element = work.element / software.gather_share
    gather = gather_seconds(ways.shared, element * shared)
    scatter = gather_seconds(ways.shared, size * shared)
    scatter = scatter + reduce_seconds(ways.replicate, size * shared / ways.shared.degree)
    some = np.asarray(routed) > 0.0
    gather = gather + np.where(some, gather_seconds(ways.routed, element * routed), 0.0)
    scatter = scatter + np.where(some, gather_seconds(ways.routed, size * routed), 0.0)
    return gather, scatter


def adding_seconds(work: Work, held: Held) -> Num:
    """Return the seconds in which gradients of a microbatch are added to those before it."""
    weights = held.blocks + held.ends + held.routed
    return moved_seconds(work.machine, work.software.adding_bytes * weights)


def update_seconds(work: Work, held: Held) -> Num:
    """Return the seconds in which the optimizer reads and writes its states, and gets them."""
    layout, software = work.layout, work.software
    cut = np.asarray(layout.zero) >= 1.0
    inner = layout.ep * layout.expert_tp
    expert_cut = np.maximum(1.0, layout.tp * layout.shard / inner)
    shared = (held.blocks + held.ends) / np.where(cut, layout.shard, 1.0)
    routed = held.routed / np.where(cut, expert_cut, 1.0)
    machine = work.machine
    bandwidth = machine.memory_bandwidth * machine.optimizer
    moved = software.optimizer_bytes * (shared + routed) / bandwidth
    return moved + offload_seconds(work, shared + routed)
