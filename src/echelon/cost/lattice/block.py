"""Seconds of one block for one microbatch on one rank: forward, input gradient, weight gradient.

Every product has its shard's shape: of N tokens on a context rank and tensor degree t, a
column-cut weight [h, n] is [N, h] x [h, n / t], a row-cut one [N, n / t] x [n / t, h]. The gradient
of the input is [N, n / t] x [n / t, h], that of the weight [h, N] x [N, n / t]. Attention without a
fused kernel is two batched products of depth head_dim and scores that go through memory; a fused
one is 4 N reach A FLOPs forward, 10 backward (Dao, FlashAttention-2, 2023). A pass takes no less
than its kernels take to start.

Sent by a block, forward and again backward: two all-reduces of N h over tp (with sequence
parallelism a gather and a reduce-scatter each: the same bytes; Korthikanti et al., 2022, section
4.2); keys and values around a ring or gathered, or heads against positions, over cp; rows of tokens
to their experts and back over ep.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from echelon.cost.lattice.numbers import LayoutNumbers, MachineNumbers, ModelNumbers, Num
from echelon.cost.lattice.products import aligned_share, moved_seconds, product_seconds
from echelon.cost.lattice.software import Software
from echelon.cost.lattice.travel import (
    Way,
    exchange_seconds,
    gather_seconds,
    message_seconds,
    reduce_seconds,
    way_of,
)

BACKWARD_KERNELS = 1.5
BACKWARD_MOVES = 1.5
COUNTS_READ, EXPERTS_HERE = 0.5, 8.0
"""The share of a mixture's wait that is no expert's own, and of how many experts it is told."""
STARTED_S = 4e-6
"""What a host takes to start a kernel where it is no graph of many that is started."""
MOST_FUSED, MOST_FUSED_BACK = 0.85, 0.65
"""The share of a device's peak that the best fused kernels of attention reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Give the seconds of a pass through a block, by what they go to."""

    products: Num
    attention: Num
    moves: Num
    host: Num
    tensor: Num
    context: Num
    expert: Num

    @property
    def total(self) -> Num:
        """Return the sum."""
        compute = self.products + self.attention + self.moves + self.host
        return compute + self.tensor + self.context + self.expert

    @property
    def compute(self) -> Num:
        """Return the seconds in which the device computes, or waits for its host."""
        return self.products + self.attention + self.moves + self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeconds:
    """Give the passes of a block: forward, gradients of inputs, gradients of weights."""

    forward: Pass
    inputs: Pass
    weights: Num


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Bundle what every part of a block reads."""

    model: ModelNumbers
    machine: MachineNumbers
    software: Software
    layout: LayoutNumbers

    @property
    def element(self) -> Num:
        """Return the bytes of an element in which a run computes."""
        return self.software.element_bytes

    @property
    def tokens(self) -> Num:
        """Return the tokens of a microbatch on a context rank."""
        return self.layout.microbatch * self.model.length / self.layout.cp


def block_seconds(work: Work, *, mixture: bool) -> BlockSeconds:
    """Return the seconds of a dense block, or of one with experts."""
    forward, inputs, weights = _attention_products(work)
    inner = _expert_products(work) if mixture else _dense_products(work, work.model.ffn)
    forward, inputs, weights = (
        a + b for a, b in zip((forward, inputs, weights), inner, strict=True)
    )
    attention, attention_back = _attention(work)
    moves = _moves(work, mixture=mixture)
    tensor, tensor_back = _tensor(work)
    context, context_back = _context(work, attention, attention_back)
    expert = _expert(work) if mixture else 0.0
    software = work.software
    start = software.kernels * software.host_s
    reading = _host_of_experts(work) if mixture else 0.0
    device = forward + attention + moves
    first = Pass(
        products=forward,
        attention=attention,
        moves=moves,
        host=np.maximum(software.host_adds * start, start - device) + reading,
        tensor=tensor,
        context=context,
        expert=expert,
    )
    back = BACKWARD_MOVES * moves
    device = inputs + weights + attention_back + back
    hidden = software.tensor_overlap * (weights + 0.0)
    later = BACKWARD_KERNELS * start
    second = Pass(
        products=inputs,
        attention=attention_back,
        moves=back,
        host=np.maximum(software.host_adds * later, later - device) + reading,
        tensor=np.maximum(0.25 * tensor_back, tensor_back - hidden),
        context=context_back,
        expert=expert,
    )
    return BlockSeconds(forward=first, inputs=second, weights=weights)


def _linear(work: Work, rows: Num, depth: Num, columns: Num) -> tuple[Num, Num, Num]:
    machine, element = work.machine, work.element
    used = np.asarray(depth * columns) > 0
    return (
        np.where(used, product_seconds(machine, rows, depth, columns, element), 0.0),
        np.where(used, product_seconds(machine, rows, columns, depth, element), 0.0),
        np.where(used, product_seconds(machine, depth, rows, columns, element), 0.0),
    )


def _sum(*parts: tuple[Num, Num, Num]) -> tuple[Num, Num, Num]:
    forward, inputs, weights = parts[0]
    for part in parts[1:]:
        forward, inputs, weights = forward + part[0], inputs + part[1], weights + part[2]
    return forward, inputs, weights


def _host_of_experts(work: Work) -> Num:
    """Return how long a pass waits for the host: for the counts of rows, and for each expert."""
    here = np.maximum(work.model.experts, 1.0) / work.layout.ep
    part = COUNTS_READ + (1.0 - COUNTS_READ) * here / EXPERTS_HERE
    quick = np.minimum(1.0, np.asarray(work.machine.launch_s) / STARTED_S)
    return quick * work.software.mixture_s * part


def _attention_products(work: Work) -> tuple[Num, Num, Num]:
    model, tp, tokens = work.model, work.layout.tp, work.tokens
    latent = np.asarray(model.kv_rank) > 0
    # Some latent models lead only keys and values down: queries come of the stream.
    direct = np.where(np.asarray(model.query_rank) > 0, 0.0, model.query_dim)
    plain = np.where(latent, direct, model.query_dim + 2.0 * model.kv_dim)
    width = np.where(latent, model.value_dim, model.query_dim)
    parts = [
        _linear(work, tokens, model.hidden, plain / tp),
        _linear(work, tokens, width / tp, model.hidden),
    ]
    if latent.any():
        down = model.query_rank + model.kv_rank
        parts.append(_linear(work, tokens, model.hidden, down))
        parts.append(_linear(work, tokens, model.query_rank, model.query_dim / tp))
        parts.append(_linear(work, tokens, model.kv_rank - model.rope_dim, model.kv_up_dim / tp))
    return _sum(*parts)


def _dense_products(work: Work, ffn: Num) -> tuple[Num, Num, Num]:
    model, tp = work.model, work.layout.tp
    return _sum(
        _linear(work, work.tokens, model.hidden, model.up * ffn / tp),
        _linear(work, work.tokens, ffn / tp, model.hidden),
    )


def _expert_products(work: Work) -> tuple[Num, Num, Num]:
    """Return the seconds of the experts of a rank: each has its rows, one after the other."""
    model, layout = work.model, work.layout
    experts = np.maximum(model.experts, 1.0)
    here = experts / layout.ep
    ranks = layout.tp / layout.expert_tp
    rows = work.tokens * model.top_k / ranks * layout.ep / experts
    width = model.expert_ffn / layout.expert_tp
    routed = _sum(
        _linear(work, rows, model.hidden, model.up * width),
        _linear(work, rows, width, model.hidden),
    )
    router = _linear(work, work.tokens / ranks, model.hidden, experts)
    shared = _dense_products(work, model.shared_experts * model.expert_ffn)
    return _sum((here * routed[0], here * routed[1], here * routed[2]), router, shared)


def _attention(work: Work) -> tuple[Num, Num]:
    """Return the seconds of attention itself, forward and backward."""
    model, machine, software = work.model, work.machine, work.software
    ranks = work.layout.tp * work.layout.cp
    queries = work.layout.microbatch * model.length / ranks
    flops = 4.0 * queries * model.reach * model.attention_dim
    peak = machine.attention_flops * software.fused_share
    most = machine.attention_flops
    fused = flops / np.minimum(peak * machine.attention, MOST_FUSED * most)
    rate_back = np.minimum(peak * machine.attention_backward, MOST_FUSED_BACK * most)
    fused_back = 2.5 * flops / rate_back
    # Without a fused kernel the mask hides nothing of the products.
    scores = queries * model.length * model.heads
    aligned = aligned_share(machine, model.attention_dim / model.heads)
    whole = 4.0 * queries * model.length * model.attention_dim
    rate = machine.attention_flops * machine.attention * aligned**2
    plain = whole / rate + moved_seconds(machine, software.score_bytes * scores)
    plain_back = 2.0 * whole / rate
    plain_back = plain_back + moved_seconds(machine, BACKWARD_MOVES * software.score_bytes * scores)
    one = software.fused_attention
    return one * fused + (1.0 - one) * plain, one * fused_back + (1.0 - one) * plain_back


def _moves(work: Work, *, mixture: bool) -> Num:
    """Return the seconds of norms, activations, residuals and the like, forward."""
    model, layout, software = work.model, work.layout, work.software
    shared_out = np.where(np.asarray(layout.sequence_parallel) > 0, layout.tp, 1.0)
    ffn: Num = model.ffn / layout.tp
    if mixture:
        # Rows are copied to be sent, on arrival, and back: four times both ways.
        ffn = (model.top_k + model.shared_experts) * model.expert_ffn / layout.tp
        copied = 8.0 * model.top_k * model.hidden / layout.tp
    else:
        copied = 0.0
    bytes_each = software.width_bytes * model.hidden / shared_out + copied
    bytes_each = bytes_each + software.inner_bytes * 0.5 * (1.0 + model.up) * ffn
    # Products in fp8 read what was cast before: 2 bytes read, 1 written, and 1 for its transpose.
    narrow = np.where(np.asarray(work.machine.peak_flops) > work.machine.attention_flops, 4.0, 0.0)
    bytes_each = bytes_each + narrow * (3.0 * model.hidden / shared_out + ffn)
    # The bytes of a trainer are those of 2-byte elements.
    return moved_seconds(work.machine, 0.5 * work.element * bytes_each * work.tokens)


def _tensor(work: Work) -> tuple[Num, Num]:
    """Return the seconds of the exchanges of tensor parallelism, forward and backward."""
    layout, num_bytes = work.layout, work.element * work.tokens * work.model.hidden
    sums = 2.0 * reduce_seconds(own_way(work, layout.tp, 1.0), num_bytes)
    each = gather_seconds(pair_way(work, layout.tp, 1.0), num_bytes)
    cut = np.asarray(layout.sequence_parallel * work.software.by_pairs) > 0
    return np.where(cut, 4.0 * each, sums), np.where(cut, 6.0 * each, sums)


def own_way(work: Work, degree: Num, stride: Num) -> Way:
    """Return what a collective of the library's own has of the links of a group."""
    way, hops = pair_way(work, degree, stride), work.software.own_hops
    return replace(way, near_latency_s=hops * way.near_latency_s, latency_s=hops * way.latency_s)


def pair_way(work: Work, degree: Num, stride: Num) -> Way:
    """Return what a group has of its links: in a ring, or with all pairs of ranks at once."""
    way, more = way_of(work.machine, degree, stride), work.software.pair_hops
    ring = np.maximum(way.local - 1.0, 1.0)
    share = (1.0 + more * (ring - 1.0)) / ring
    share = np.where(np.asarray(work.software.by_pairs) > 0, share, 1.0)
    return replace(way, near_latency_s=share * way.near_latency_s)


def _context(work: Work, attention: Num, attention_back: Num) -> tuple[Num, Num]:
    """Return what is waited for of context parallelism, forward and backward."""
    model, layout = work.model, work.layout
    ring = layout.cp / layout.ulysses
    stride = layout.tp * layout.ulysses
    ring_way = way_of(work.machine, ring, stride)
    latent = np.asarray(model.kv_rank) > 0
    kv = np.where(latent, model.kv_up_dim, 2.0 * model.kv_dim) / layout.tp
    kept = work.element * work.tokens * layout.ulysses * kv / layout.ulysses
    steps = np.maximum(ring - 1.0, 0.0)
    round_trip = steps * message_seconds(ring_way, kept)
    shown = np.maximum(0.0, round_trip - attention * steps / np.maximum(ring, 1.0))
    shown_back = np.maximum(0.0, 2.0 * round_trip - attention_back * steps / np.maximum(ring, 1.0))
    gather = gather_seconds(pair_way(work, ring, stride), kept * ring)
    heads_way = own_way(work, layout.ulysses, layout.tp)
    heads = work.element * work.tokens * (2.0 * model.query_dim / layout.tp + kv)
    exchange = exchange_seconds(heads_way, heads)
    whole = np.asarray(layout.gathered) > 0
    forward = np.where(whole, gather, shown) + exchange
    backward = np.where(whole, 2.0 * gather, shown_back) + exchange
    return forward, backward


def _expert(work: Work) -> Num:
    """Return the seconds in which rows travel to their experts and back, in one pass."""
    model, layout = work.model, work.layout
    ranks = layout.tp / layout.expert_tp
    stride = np.where(np.asarray(layout.expert_tp) > 1.0, layout.tp, 1.0)
    way = way_of(work.machine, layout.ep, stride)
    row = work.element * work.tokens / ranks * model.hidden
    nodes = np.maximum(way.degree / way.local, 1.0)
    # A token that several experts of a node wait for crosses once where a trainer sees to it.
    reached = nodes * (1.0 - (1.0 - 1.0 / nodes) ** model.top_k)
    copies = np.where(np.asarray(work.software.once_per_node) > 0, reached, model.top_k)
    far = row * copies * (nodes - 1.0) / nodes / way.far
    near = row * model.top_k * (way.local - 1.0) / way.local / way.near
    start = way.latency_s * np.sqrt(way.degree) + way.half_bytes / way.bus
    each = np.where(np.asarray(layout.ep) > 1.0, start + np.maximum(far, near), 0.0)
    return 2.0 * (1.0 - work.software.expert_overlap) * each
