# SPDX-License-Identifier: Apache-2.0
"""Seconds of data parallelism: gradients' travel, gathers of ZeRO, and the update.

Without ZeRO gradients of a rank's weights are all-reduced once a step. At stages 1 and 2 they are
scattered, and parameters gathered after the update: the same bytes. At stage 3 every block's
parameters are gathered for forward and for backward, and its gradients scattered, of every
microbatch (with secondary slices, inside of nodes but for the first: Wang et al., ZeRO++, 2023);
that hides behind the compute of the blocks beside it, but for the first and the last
(Rajbhandari et al., ZeRO, 2020, section 7; Zhao et al., PyTorch FSDP, 2023, section 3.3). Hybrid
sharding adds an all-reduce of slices over dp_replicate. Experts have their own groups.

Our trainer updates on the device also where optimizer state rests with the host: each step the
master copy and the state of a rank's slices come over the host's link, bucket by bucket, and go
back behind the update (`parallel/offload/`), so both directions are at work at once. ZeRO-Offload
(Ren et al., 2021, section 4) updates on the host's processors instead and sends gradients and
parameters; its update takes about as long, bound by the host's memory. On processors the host is
the device, and nothing travels.

Where a preset says nothing of the link of its hosts it is PCIe 4.0 x16: 16 GT/s x 16 lanes x 128 /
130 / 8 = 31.5 GB/s each way (PCI-SIG, PCI Express Base Specification 4.0); copies reach `REACHED`
of it, both ways at once. Files are not modelled: ZeRO-Infinity (Rajbhandari et al., 2021, figure
2b) counts 1.6 GB/s for a GPU.

Local SGD (`outer_seconds`): a round of H steps sends the slices of a rank once over `dp_replicate`,
whose groups are the outermost: a fragment of P at a time. Without delay a step waits for its
fragment; with a delay of d steps it travels behind d times all else that a step takes. A mean step
shows

    P max(0, t_fragment - d t_step) / H

The outer step reads and writes outer parameters, momentum and values: six numbers a weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echelon.cost.inputs.cost_inputs import (
    CostInputs,
    GroupLinkNumbers,
    data_group_links,
    group_link_numbers,
    library_group_links,
    pairwise_group_links,
)
from echelon.cost.inputs.numbers import Num
from echelon.cost.seconds.collectives import (
    all_gather_seconds,
    gather_seconds,
    point_to_point_seconds,
    sum_seconds,
)
from echelon.cost.seconds.exchanges import slices_seconds
from echelon.cost.seconds.kernels import memory_seconds

HOST_UPDATE_BYTES_PER_S = 60e9
"""What the processors of a node reach of their memory while they update."""
SUM_SHARE = 0.5
"""What casts of gradients to fp32, and sums of them for a norm, reach of the rate of an update: on
an H200 1.9 and 2.3 TB/s of 3.8 (bench/results/2026-11-26-gpu-nvidia-h200.md, 8b-half and 3b)."""
REACHED = 0.765
"""The share of a link's rate that copies to and from the host reach while both go at once: on an
H200 (PCIe 5.0) 13.2 GB came in 274 ms, 48 GB/s, and went in 256 ms, 52 GB/s (the same page)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeights:
    """Give the weights of the rank that holds most: blocks' own, of routed experts, of the ends."""

    blocks: Num
    routed: Num
    ends: Num


def step_collective_seconds(work: CostInputs, held: HeldWeights) -> tuple[Num, Num]:
    """Return the seconds of gradients' travel, and of gathers, once a step at stages 0 to 2."""
    layout, software = work.layout, work.software
    ways = data_group_links(work)
    cut = np.asarray(layout.zero) >= 1.0
    shared, routed = held.blocks + held.ends, held.routed

    def reduced(way: GroupLinkNumbers, whole: GroupLinkNumbers, weights: Num) -> Num:
        weights = work.model.trained * weights
        size = software.reduced_bytes * weights / software.reduce_share
        across = sum_seconds(ways.replicate, np.where(cut, size / way.degree, size), layout.sums)
        exact = _slices_seconds(work, way, whole, size)
        sliced = _scatter_seconds(work, way, weights, exact)
        return np.where(cut, sliced, sum_seconds(whole, size, layout.sums)) + across

    def gathered(way: GroupLinkNumbers, whole: GroupLinkNumbers, weights: Num) -> Num:
        return np.where(cut, _slices_seconds(work, way, whole, work.element * weights), 0.0)

    if np.any(np.asarray(layout.servers) > 0.0):
        return server_seconds(work, shared)
    none = np.asarray(routed) == 0.0
    reduce = reduced(ways.shared, ways.shared_sum, shared)
    reduce = reduce + np.where(none, 0.0, reduced(ways.routed, ways.routed_sum, routed))
    gather = gathered(ways.shared, ways.shared_sum, shared)
    gather = gather + np.where(none, 0.0, gathered(ways.routed, ways.routed_sum, routed))
    return reduce, gather


def server_seconds(work: CostInputs, weights: Num) -> tuple[Num, Num]:
    """Return the seconds in which gradients reach parameter servers, and parameters come back.

    With M bytes of so many weights, W workers and S servers, each worker's link carries M one way,
    and each server's W M / S: the bottleneck is the larger (Li et al., 2014, section 4).
    """
    layout = work.layout
    way = group_link_numbers(work.machine, layout.dp + layout.servers, 1.0)
    fullest = np.maximum(1.0, layout.dp / np.maximum(1.0, layout.servers)) * weights
    push, pull = (
        point_to_point_seconds(way, size * fullest)
        for size in (work.software.reduced_bytes, work.element)
    )
    return push, pull


def unit_gather_seconds(
    work: CostInputs, shared: Num, routed: Num, *, is_block: bool = True
) -> tuple[Num, Num]:
    """Return the seconds of one gather, and of one reduce-scatter, of a block at stage 3.

    What is no block, embedding and head, is gathered as codes in int8 only. Norms, biases and
    routers, which are not either, are too small to count.
    """
    software, ways = work.software, data_group_links(work)
    size = software.reduced_bytes / software.gather_share
    codes = np.maximum(float(is_block), np.asarray(work.layout.gathers_ends))
    coded = codes * np.asarray(work.layout.gathered_bytes)
    element = np.where(coded > 0.0, coded, work.element) / software.gather_share
    pair, routed_pair = (ways.shared, ways.shared_sum), (ways.routed, ways.routed_sum)
    gather = _slices_seconds(work, *pair, element * shared)
    trained = work.model.trained * shared
    exact = _slices_seconds(work, *pair, size * trained)
    scatter = _scatter_seconds(work, ways.shared, trained, exact)
    slices = size * trained / ways.shared.degree
    scatter = scatter + sum_seconds(ways.replicate, slices, work.layout.sums)
    some = np.asarray(routed) > 0.0
    gather = gather + np.where(some, _slices_seconds(work, *routed_pair, element * routed), 0.0)
    exact = _slices_seconds(work, *routed_pair, size * routed)
    routes = _scatter_seconds(work, ways.routed, routed, exact)
    scatter = scatter + np.where(some, routes, 0.0)
    held = shared / work.layout.shard + routed / work.layout.expert_shard
    travels = parameter_offload_seconds(work, held)
    return gather + travels, scatter + travels


def _slices_seconds(
    work: CostInputs, way: GroupLinkNumbers, steps: GroupLinkNumbers, num_bytes: Num
) -> Num:
    """Return the seconds in which slices are gathered or summed, by pairs or by steps of a plan."""
    direct = all_gather_seconds(way, num_bytes)
    return gather_seconds(steps, num_bytes, work.layout.sums, direct=direct)


def _scatter_seconds(work: CostInputs, way: GroupLinkNumbers, weights: Num, exact: Num) -> Num:
    """Return the seconds in which gradients are summed into slices; `exact` those of exact sums.

    In two hops of c bytes for each of W gradients, with l of n = k l ranks on each node:

        inside  a + (l-1)/l W c / N       across  b + (k-1)/k W c / (l F)
    """
    size = np.asarray(work.layout.summed_bytes)
    if not np.any(size > 0.0):
        return exact
    local, nodes = np.asarray(way.ranks_per_node), way.degree / way.ranks_per_node
    sent = size * weights / work.software.reduce_share
    near = (local - 1.0) / local * (sent + way.half_bytes) / way.node_bandwidth
    far = (nodes - 1.0) / nodes * (sent / local + way.half_bytes) / way.network_bandwidth
    hops = way.node_latency_s + near + way.latency_s + far
    return np.where((size > 0.0) & (local > 1.0) & (local < way.degree), hops, exact)


def node_gather_seconds(work: CostInputs, shared: Num, routed: Num, *, far: Num) -> Num:
    """Return the seconds of a gather from secondary slices; `far` where there are none of them.

    They are on the device, and wherever they are, all of a node's ranks have some.
    """
    layout, software = work.layout, work.software
    if not np.any(np.asarray(layout.secondary) > 0.0):
        return far
    ways = data_group_links(work)
    coded = np.asarray(layout.gathered_bytes) * (1.0 - np.asarray(layout.gathers_ends))
    element = np.where(coded > 0.0, coded, work.element) / software.gather_share
    found: Num = 0.0
    inner = layout.ep * layout.expert_tp
    for way, whole_way, stride, weights in (
        (ways.shared, ways.shared_sum, layout.tp, shared),
        (ways.routed, ways.routed_sum, inner, routed),
    ):
        local = np.asarray(way.ranks_per_node)
        kept = (local > 1.0) & (local < way.degree)
        each = np.where(kept, slices_seconds(work, local, stride, element * weights), 0.0)
        whole = _slices_seconds(work, way, whole_way, element * weights)
        found = found + np.where(np.asarray(weights) > 0.0, np.where(kept, each, whole), 0.0)
    return np.where(np.asarray(layout.secondary) > 0.0, found, far)


def accumulation_seconds(work: CostInputs, held: HeldWeights) -> Num:
    """Return the seconds in which gradients of a microbatch are added to those before it."""
    weights = work.model.trained * (held.blocks + held.ends + held.routed)
    return memory_seconds(work.machine, work.software.adding_bytes * weights)


def update_seconds(work: CostInputs, held: HeldWeights) -> Num:
    """Return the seconds in which the optimizer reads and writes its states, and gets them.

    A trainer's pace is that of its kernels: what travels to a host and back is as fast as the link.
    """
    layout, software, weights = work.layout, work.software, updated_weights(work, held)
    machine = work.machine
    bandwidth = machine.memory_bandwidth * machine.optimizer
    moved = update_bytes(work) * weights / bandwidth
    there = layout.offload * software.host_updates
    by_host = host_update_seconds(work, there * weights)
    return software.pace * (by_host + (1.0 - there) * moved) + offload_seconds(work, weights)


def updated_weights(work: CostInputs, held: HeldWeights) -> Num:
    """Return how many weights a rank updates of those that it holds."""
    layout = work.layout
    cut = np.asarray(layout.zero) >= 1.0
    shared = (held.blocks + held.ends) / np.where(cut, layout.shard, 1.0)
    shared = shared / np.maximum(1.0, layout.servers)
    return work.model.trained * (shared + held.routed / np.where(cut, layout.expert_shard, 1.0))


def update_bytes(work: CostInputs) -> Num:
    """Return the bytes that an update moves for a weight, as if all of them went at its rate."""
    software = work.software
    casts = software.casts_apart * (software.cast_traffic / SUM_SHARE + software.copy_traffic)
    counted = software.update_traffic + software.norm_traffic / SUM_SHARE + casts
    return np.where(np.asarray(software.optimizer_bytes) > 0.0, software.optimizer_bytes, counted)


def host_update_seconds(work: CostInputs, weights: Num) -> Num:
    """Return the seconds in which a host updates its ranks' slices, of so many weights each.

    It reads gradients, reads and writes states, and writes parameters, which then go back.
    """
    software = work.software
    each = 2.0 * software.state_bytes + software.gradient_bytes + work.element
    beside = np.minimum(work.machine.node, work.layout.devices)
    travels = work.element * weights / (REACHED * work.machine.host_bandwidth)
    return each * weights * beside / HOST_UPDATE_BYTES_PER_S + travels


def parameter_offload_seconds(work: CostInputs, weights: Num) -> Num:
    """Return the seconds in which a rank's slices, of so many weights, come for one pass."""
    elsewhere = np.asarray(work.software.host_adds) < 1.0
    there = (np.asarray(work.layout.parameter_offload) > 0) & elsewhere
    return np.where(there, work.element * weights / (REACHED * work.machine.host_bandwidth), 0.0)


def offload_seconds(work: CostInputs, weights: Num) -> Num:
    """Return the seconds in which the state of a rank's slices, of so many weights, travels."""
    there = work.layout.offload * (1.0 - np.asarray(work.software.host_updates))
    elsewhere = np.asarray(work.software.host_adds) < 1.0
    travels = there * work.software.state_bytes * weights / (REACHED * work.machine.host_bandwidth)
    return np.where(elsewhere, travels, 0.0)


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
