# SPDX-License-Identifier: Apache-2.0
"""All that the formulas read of a plan, and what they come out with: terms that add up.

Beside the numbers of `numbers.py` that is what a trainer does that its plan does not say. Seconds
and bytes of one plan differ between trainers, by how many kernels a block is, how often a value is
written to memory between them, in which dtype gradients are added up and sent, and what is sent
while a device computes. These are facts of code and the constants of its kernels: no field belongs
to a model, a cluster or a published run.

A group of `degree` ranks, `stride` apart, uses the fastest tier that joins all of its ranks. Where
that is a network, its nodes hold several ranks of it each, whose ways into the network it uses
together; the groups beside it use the others at the same time: each rank has its share of its
node's interfaces. Bus bandwidth is that of the slowest part: the tier inside of nodes, or the
interfaces of the ranks of one node together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from echelon.cost.inputs.numbers import LayoutNumbers, MachineNumbers, ModelNumbers, Num


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConstants:
    """Give the facts of a trainer; numbers, or arrays [rows] where rows of a table differ.

    A share is between 0 and 1, a flag 0 or 1. Bytes of traffic are those of the device's memory.
    """

    element_bytes: Num = 2.0
    """Bytes of an element of parameters and activations; other bytes are told for elements of 2."""
    step_error: Num = 0.0
    """Mean |predicted / measured - 1| of steps on the machine that were not fitted; 0: unknown."""
    pace: Num = 1.0
    """What a step takes over the sum of its parts, each as fast as it is by itself: gaps between
    kernels, clocks under load, what else runs."""
    fused_attention: Num = 1.0
    """Flag: one kernel that never writes the scores, which skips what a causal mask hides."""
    fused_share: Num = 1.0
    """What its fused attention reaches of the rate of the best one of the device."""
    score_bytes: Num = 16.0
    """Without fused attention, bytes of traffic of a score forward; backward 1.5 times as many."""
    width_bytes: Num = 40.0
    """Bytes of traffic of a block forward beside its products, for each token and width of
    `hidden`."""
    inner_bytes: Num = 8.0
    """Bytes of traffic of a block forward beside its products, for each token and width of
    `ffn`."""
    head_bytes: Num = 0.0
    """The same for each token and width of queries, keys and values; 0: in `width_bytes`."""
    head_passes: Num = 1.5
    """`head_bytes` backward over those forward."""
    width_passes: Num = 1.5
    """`width_bytes` backward over those forward."""
    inner_passes: Num = 1.5
    """`inner_bytes` backward over those forward."""
    kernels: Num = 40.0
    """Kernels of a block forward; backward 1.5 times as many."""
    host_s: Num = 6e-6
    """Seconds in which the host starts a kernel, while the device works on those before it."""
    hook_s: Num = 1e-3
    """Seconds of a pass through a block in which the host finds, gathers and frees parameters that
    ZeRO cut (stage 3)."""
    host_adds: Num = 0.0
    """Flag: the host is the device, so that `host_s` adds to every kernel."""
    by_pairs: Num = 0.0
    """Flag: gathers and reduce-scatters are messages between each pair of ranks, and inputs that
    sequence parallelism cut are gathered once more for their weights' gradients."""
    own_hops: Num = 1.0
    """Latency of a hop of a collective of the library's own, over that of one of those messages."""
    pair_hops: Num = 1.0
    """Latency of one more rank that is spoken to at the same time, over that of the first."""
    fp8_bytes: Num = 4.0
    """Bytes of traffic to cast an element that a product in fp8 takes, with its scale."""
    wide_weight_gradients: Num = 0.0
    """Flag: where other products are in fp8, those of weight gradients are in the dtype of
    parameters."""
    wide_input_gradients: Num = 0.0
    """Flag: the same of the products for the gradients of inputs."""
    copies_in_fp8: Num = 0.0
    """Flag: our output layer keeps 8-bit numbers beside what attention keeps, in fp8."""
    host_updates: Num = 0.0
    """Flag: processors of the host update what is offloaded."""
    mixture_s: Num = 1e-3
    """Seconds that a pass through experts waits for the host to read how many tokens each gets."""
    logit_bytes: Num = 24.0
    """Bytes of traffic of the loss for each logit."""
    gradient_bytes: Num = 4.0
    """Bytes of an element in which gradients add up."""
    adding_bytes: Num = 0.0
    """Bytes of traffic of a microbatch for each weight to add gradients up; 0: products do it in
    passing."""
    reduced_bytes: Num = 4.0
    """Bytes of an element in which gradients travel."""
    reduce_overlap: Num = 0.0
    """Share of the backward pass of the last microbatch that hides reductions of gradients."""
    reduce_share: Num = 0.8
    """What a reduction of gradients reaches of the rate of a collective of the cluster."""
    gather_overlap: Num = 0.8
    """Share of compute under which gathers of ZeRO are hidden."""
    gather_share: Num = 1.0
    """What gathers of ZeRO reach of a link's rate; little, where each parameter travels by
    itself."""
    expert_overlap: Num = 0.0
    """Share of compute under which rows to experts are hidden."""
    once_per_node: Num = 0.0
    """Flag: a token crosses to a node once."""
    tensor_overlap: Num = 0.0
    """Share of compute under which exchanges of tensor parallelism are hidden."""
    pipeline_overlap: Num = 0.0
    """Share of compute under which messages between stages that do not wait are hidden."""
    scattered_messages: Num = 1.0
    """Flag: messages between stages are cut over the tensor ranks."""
    optimizer_bytes: Num = 40.0
    """Bytes of traffic of the update for each weight; 0: those of the next five."""
    update_traffic: Num = 28.0
    """Bytes that one kernel of an update moves for a weight: states, gradient and parameter."""
    norm_traffic: Num = 2.0
    """Bytes of a gradient that are read for the norm of all of them."""
    cast_traffic: Num = 6.0
    """Bytes to cast a gradient to the dtype of states, where that is a kernel of its own."""
    copy_traffic: Num = 6.0
    """Bytes to write a parameter in its dtype, where that is a kernel of its own."""
    casts_apart: Num = 0.0
    """Flag: they are."""
    interference: Num = 0.0
    """Share by which gathers slow the compute that they run beside."""
    step_s: Num = 0.01
    """Seconds of a step beside all that: data, logging, the host's part of the update."""
    spread: Num = 0.01
    """Share by which the times of ranks vary."""
    state_bytes: Num = 12.0
    """Bytes of the optimizer for a weight, with its master copy."""
    update_bytes: Num = 0.0
    """Bytes that an update needs for a weight beside those, for a while (gradients in fp32,
    products)."""
    parameter_bytes: Num = 0.0
    """Bytes of an element of the parameters that rest between uses; 0: those of `element_bytes`."""
    cast_bytes: Num = 0.0
    """Bytes of copies of a weight in the dtype of a product, beside it while a microbatch runs;
    those that backward needs (`late_gradients`) are gone where blocks run again."""
    gathered_bytes: Num = 0.0
    """Bytes of a weight of the largest block that ZeRO 3 gathers, beside both ends; 0: of two of
    the largest units, and gradients."""
    bucket_weights: Num = 0.0
    """Gradients that are once more in a buffer from which they are sent, in that dtype."""
    late_gradients: Num = 0.0
    """Flag: gradients are made during backward and freed by the update."""
    offloads_gradients: Num = 0.0
    """Flag: where the optimizer is in the host's memory, gradients go there as they are made."""
    saved_width: Num = 0.0
    """Bytes that a block keeps beside `closed_forms.py`, for each token and width of `hidden`."""
    saved_repeats: Num = 0.0
    """The same for each token and width by which queries are wider than keys."""
    saved_inner: Num = 0.0
    """The same for each token and width of `ffn`, of experts for each row."""
    saved_joint: Num = 0.0
    """The same for each token and width of keys, where there are as many as queries: their common
    projection stays while keys and values are copied out of it."""
    saved_turned: Num = 0.0
    """The same for each token and width of queries, where a microbatch has several sequences:
    attention's output in the order in which the next product reads it."""
    saved_whole: Num = 0.0
    """Flag: what sequence parallelism gathers for a product waits whole for backward."""
    own_operators: Num = 0.0
    """Flag: attention keeps what that of `parallel/` keeps: queries and keys that were turned are
    in memory of their own, and context ranks have what they were given."""
    saved_away: Num = 0.0
    """Flag: what blocks keep for backward waits in the host's memory."""
    saved_normed: Num = 0.0
    """Flag: a norm of heads keeps queries and keys beside what attention keeps of them."""
    balances_head: Num = 0.0
    """Flag: stages share out blocks and the head by their work, so that the first has more
    blocks."""
    dropout: Num = 0.0
    """Flag: masks of dropout are kept."""
    working_width: Num = 16.0
    """Bytes that a block that runs has beside what it keeps, for each token and width of
    `hidden`."""
    working_inner: Num = 0.0
    """The same for each token and width of `ffn`."""
    logit_held: Num = 10.0
    """Bytes that the loss holds for each logit."""
    loss_backward: Num = 0.0
    """Flag: the loss is computed in backward, beside its gradients."""
    fused_loss: Num = 0.0
    """Flag: each pass of such a loss over logits is one kernel."""
    gpu_kernels: Num = 0.0
    """Flag: kernels of ours are those of a GPU: products of 16-bit elements add up in fp32 by
    themselves, more rows are widened at a time, and fp32 has a kernel of attention of its own."""
    loss_apart: Num = 0.0
    """Flag: the loss has let go of its logits when the last block runs backward."""
    workspace_bytes: Num = 0.0
    """Bytes that an allocator gives to libraries of products, whatever is trained."""
    grouped_workspace_bytes: Num = 0.0
    """The same for products of experts that run beside each other, where there are experts."""
    context_bytes: Num = 2.0e9
    """Bytes taken before the first tensor: the device's context, and buffers of collectives where
    `connection_bytes` does not say them."""
    connection_bytes: Num = 0.0
    """Bytes that NCCL takes for two ranks that send each other, on each; 0: not told apart."""
    pool_bytes: Num = 0.0
    """Bytes from which NCCL sends messages of one communicator to other nodes."""
    slack: Num = 0.04
    """Share that an allocator holds more than is in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostInputs:
    """Bundle what every part of a block reads."""

    model: ModelNumbers
    machine: MachineNumbers
    software: TrainerConstants
    layout: LayoutNumbers

    @property
    def element(self) -> Num:
        """Return the bytes of an element in which a run computes."""
        return self.software.element_bytes

    @property
    def tokens(self) -> Num:
        """Return the tokens of a microbatch on a context rank."""
        return self.layout.microbatch * self.model.length / self.layout.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Give the seconds of a step, or the bytes of the fullest rank, by term."""

    terms: Mapping[str, Num]

    @property
    def total(self) -> Num:
        """Return the sum."""
        return sum(self.terms.values(), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLinkNumbers:
    """Give what a group of `degree` ranks gets of its links.

    `ranks_per_node` of its ranks are in one node (or all). Bandwidths are bytes/s of one rank
    inside of nodes and between them, and those of a ring; latencies are those of a hop;
    `half_bytes` is the message that reaches half of the bandwidth.
    """

    degree: Num
    ranks_per_node: Num
    node_bandwidth: Num
    network_bandwidth: Num
    bus_bandwidth: Num
    node_latency_s: Num
    latency_s: Num
    half_bytes: Num


def group_link_numbers(machine: MachineNumbers, degree: Num, stride: Num) -> GroupLinkNumbers:
    """Return what a group of `degree` ranks that are `stride` apart gets."""
    span = degree * stride
    first = machine.tiers[0]
    near, near_latency = first.bandwidth * first.efficiency, first.latency_s
    far, latency, half, local = near, near_latency, first.half_bytes, degree
    within = first.degree
    for tier in machine.tiers[1:]:
        beyond = span > within
        local = np.where(
            beyond & (np.asarray(within) >= machine.node),
            np.minimum(degree, np.maximum(1.0, machine.node / stride)),
            local,
        )
        far = np.where(beyond, tier.bandwidth * tier.efficiency, far)
        latency = np.where(beyond, tier.latency_s, latency)
        half = np.where(beyond, tier.half_bytes, half)
        within = tier.degree
    crosses = local < degree
    bus = np.where(crosses, np.minimum(near, local * far), far)
    return GroupLinkNumbers(
        degree=degree,
        ranks_per_node=local,
        node_bandwidth=near,
        network_bandwidth=far,
        bus_bandwidth=np.where((np.asarray(local) == 1.0) & crosses, far, bus),
        node_latency_s=near_latency,
        latency_s=latency,
        half_bytes=half,
    )


def library_group_links(work: CostInputs, degree: Num, stride: Num) -> GroupLinkNumbers:
    """Return what a collective of the library's own has of the links of a group."""
    way, hops = pairwise_group_links(work, degree, stride), work.software.own_hops
    return replace(way, node_latency_s=hops * way.node_latency_s, latency_s=hops * way.latency_s)


def pairwise_group_links(work: CostInputs, degree: Num, stride: Num) -> GroupLinkNumbers:
    """Return what a group has of its links: in a ring, or with all pairs of ranks at once."""
    way, more = group_link_numbers(work.machine, degree, stride), work.software.pair_hops
    ring = np.maximum(way.ranks_per_node - 1.0, 1.0)
    share = (1.0 + more * (ring - 1.0)) / ring
    share = np.where(np.asarray(work.software.by_pairs) > 0, share, 1.0)
    return replace(way, node_latency_s=share * way.node_latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataGroupLinks:
    """Give what the groups of ranks have of the links that weights are cut or repeated over.

    `shared` are those of most weights, `routed` those of routed experts: as gathers and scatters
    use them, and as an all-reduce does (`*_sum`). `replicate` repeats both.
    """

    shared: GroupLinkNumbers
    shared_sum: GroupLinkNumbers
    routed: GroupLinkNumbers
    routed_sum: GroupLinkNumbers
    replicate: GroupLinkNumbers


def data_group_links(work: CostInputs) -> DataGroupLinks:
    """Return the groups over which weights are cut and repeated, and those of experts."""
    layout = work.layout
    inner, cut = layout.ep * layout.expert_tp, layout.expert_shard
    return DataGroupLinks(
        shared=pairwise_group_links(work, layout.shard, layout.tp),
        shared_sum=library_group_links(work, layout.shard, layout.tp),
        routed=pairwise_group_links(work, cut, inner),
        routed_sum=library_group_links(work, cut, inner),
        replicate=library_group_links(
            work,
            # Islands of local SGD sum nothing in a step (`seconds/data.py`).
            np.where(layout.apart, 1.0, layout.dp_replicate),
            layout.tp * layout.shard,
        ),
    )
