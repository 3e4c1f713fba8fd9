# SPDX-License-Identifier: Apache-2.0
"""Seconds in which a block's rows travel between ranks: over tensor, context and expert groups.

Sent by a block, forward and again backward: two all-reduces of N h over tp (with sequence
parallelism a gather and a reduce-scatter each: the same bytes; Korthikanti et al., 2022, section
4.2); keys and values around a ring or gathered, or heads against positions, over cp; rows of tokens
to their experts and back over ep. On a ring the keys of the next step travel while this one is at
work (Liu et al., "Ring Attention", 2023, section 3.1); a gather and the exchanges of heads have
nothing of attention to hide behind. Rows that go to experts in chunks hide behind the experts of
the chunk before.

Tensor ranks may run products beside the messages of their rows (`shown_in_chunks`). A gather before
a product of s seconds is tp - 1 messages of m seconds each. In chunks the product takes c = s(N /
tp) seconds a chunk, no less than s / tp, for small products are less efficient. A message travels
beside each chunk but one (Wang et al., 2023, section 3), so both take

    c + (tp - 1) max(c, m)     and the exchange shows    c + (tp - 1) max(c, m) - s

A sum that is scattered after a product takes as long: the part of a rank's own rows comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from echelon.cost.bytes.terms import WIDE_BYTES
from echelon.cost.inputs.cost_inputs import (
    CostInputs,
    group_link_numbers,
    library_group_links,
    pairwise_group_links,
)
from echelon.cost.inputs.numbers import Num
from echelon.cost.seconds.collectives import (
    all_gather_seconds,
    all_to_all_seconds,
    gather_seconds,
    point_to_point_seconds,
    sum_seconds,
)
from echelon.cost.seconds.kernels import matmul_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSeconds:
    """Give the seconds in which rows of a block travel, in each pass, and those that show.

    What shows is not hidden behind the computing of the block.
    """

    forward: Num
    backward: Num
    shown_forward: Num
    shown_backward: Num


NOTHING = ExchangeSeconds(forward=0.0, backward=0.0, shown_forward=0.0, shown_backward=0.0)


def tensor_exchange(work: CostInputs) -> tuple[Num, Num]:
    """Return the seconds of the exchanges of tensor parallelism, forward and backward."""
    layout, num_bytes = work.layout, work.element * work.tokens * work.model.hidden
    sums = 2.0 * sum_seconds(library_group_links(work, layout.tp, 1.0), num_bytes, layout.sums)
    each = slices_seconds(work, layout.tp, 1.0, num_bytes)
    cut = np.asarray(layout.sequence_parallel * work.software.by_pairs) > 0
    norms, norms_back = _width_norm_seconds(work)
    return np.where(cut, 4.0 * each, sums) + norms, np.where(cut, 6.0 * each, sums) + norms_back


def _width_norm_seconds(work: CostInputs) -> tuple[Num, Num]:
    """Return the seconds in which norms over all heads are summed: of queries and keys at once
    forward, one after the other backward."""
    way, sums = library_group_links(work, work.layout.tp, 1.0), work.layout.sums
    row = work.tokens * np.maximum(WIDE_BYTES, work.element)
    there = np.asarray(work.model.width_norms) > 0
    both, each = sum_seconds(way, 2.0 * row, sums), sum_seconds(way, row, sums)
    return np.where(there, both, 0.0), np.where(there, 2.0 * each, 0.0)


def slices_seconds(work: CostInputs, degree: Num, stride: Num, num_bytes: Num) -> Num:
    """Return the seconds in which a group gathers slices, or sums them, as the plan says."""
    direct = all_gather_seconds(pairwise_group_links(work, degree, stride), num_bytes)
    way = library_group_links(work, degree, stride)
    return gather_seconds(way, num_bytes, work.layout.sums, direct=direct)


def context_exchange(work: CostInputs, attention: Num, attention_back: Num) -> ExchangeSeconds:
    """Return what travels of positions or heads over context ranks, beside so much attention."""
    model, layout = work.model, work.layout
    ring = layout.cp / layout.ulysses
    stride = layout.tp * layout.ulysses
    ring_way = group_link_numbers(work.machine, ring, stride)
    latent = np.asarray(model.kv_rank) > 0
    kv = np.where(latent, model.kv_up_dim, 2.0 * model.kv_dim) / layout.tp
    kept = work.element * work.tokens * layout.ulysses * kv / layout.ulysses
    steps = np.maximum(ring - 1.0, 0.0)
    round_trip = steps * point_to_point_seconds(ring_way, kept)
    beside = steps / np.maximum(ring, 1.0)
    shown = _shown_beside(work, round_trip, attention * beside)
    shown_back = _shown_beside(work, 2.0 * round_trip, attention_back * beside)
    gather = all_gather_seconds(pairwise_group_links(work, ring, stride), kept * ring)
    heads_way = library_group_links(work, layout.ulysses, layout.tp)
    heads = work.element * work.tokens * (2.0 * model.query_dim / layout.tp + kv)
    exchange = all_to_all_seconds(heads_way, heads)
    whole = np.asarray(layout.gathered) > 0
    return ExchangeSeconds(
        forward=np.where(whole, gather, round_trip) + exchange,
        backward=2.0 * np.where(whole, gather, round_trip) + exchange,
        shown_forward=np.where(whole, gather, shown) + exchange,
        shown_backward=np.where(whole, 2.0 * gather, shown_back) + exchange,
    )


def _shown_beside(work: CostInputs, travel: Num, computing: Num) -> Num:
    """Return what shows of messages beside computing, which they slow where they run at once."""
    slowed = work.software.interference * np.minimum(travel, computing)
    return np.maximum(0.0, travel - computing) + slowed


def expert_exchange(work: CostInputs, computing: Sequence[Num]) -> ExchangeSeconds:
    """Return what rows on their way to their experts and back take, in each pass.

    `computing` are the seconds of the experts meanwhile, forward and of the gradients of inputs.
    """
    model, layout = work.model, work.layout
    ranks = layout.tp / layout.expert_tp
    stride = np.where(np.asarray(layout.expert_tp) > 1.0, layout.tp, 1.0)
    way = group_link_numbers(work.machine, layout.ep, stride)
    row = layout.padding * work.element * work.tokens / ranks * model.hidden
    nodes = np.maximum(way.degree / way.ranks_per_node, 1.0)
    # A token that several experts of a node wait for crosses once where a trainer sees to it.
    reached = nodes * (1.0 - (1.0 - 1.0 / nodes) ** model.top_k)
    two_hop = np.asarray(layout.two_hop) > 0
    once = two_hop | (np.asarray(work.software.once_per_node) > 0)
    copies = np.where(once, reached, model.top_k)
    far = row * copies * (nodes - 1.0) / nodes / way.network_bandwidth
    near = row * model.top_k * (way.ranks_per_node - 1.0) / way.ranks_per_node / way.node_bandwidth
    start = way.latency_s * np.sqrt(way.degree) + way.half_bytes / way.bus_bandwidth
    # Links of both tiers are busy at once, unless one hop follows the other.
    travel = np.where(two_hop, start + far + near, np.maximum(far, near))
    some = np.asarray(layout.ep) > 1.0
    each = np.where(some, layout.chunks * start + travel, 0.0)
    shown = 1.0 - work.software.expert_overlap
    both = forward = backward = 2.0 * each
    if np.any(np.asarray(layout.chunks) > 1.0):
        forward = _shown_in_chunks(each, computing[0], layout.chunks)
        backward = _shown_in_chunks(each, computing[1], layout.chunks)
    return ExchangeSeconds(
        forward=both, backward=both, shown_forward=shown * forward, shown_backward=shown * backward
    )


def _shown_in_chunks(each: Num, computing: Num, chunks: Num) -> Num:
    """Return what shows of two ways of `each` seconds while experts compute chunk by chunk.

    The first chunk's way there and the last one's way back always do. Where the link is slower, it
    does all ways one after the other and waits for the first chunk that is computed, if at all.
    """
    there, chunk = each / chunks, computing / chunks
    by_link = 2.0 * each + np.maximum(0.0, chunk - there) - computing
    return np.maximum(2.0 * there, by_link)


LayerPair: TypeAlias = "tuple[Num, Num]"
"""Columns that a rank has of a layer which reads the stream, and those that go back into it."""

STEP_KERNELS = 3.0
"""Kernels of each further chunk: its product, its sum with what came, its message."""
EXCHANGES = 4.0
"""Gathers and scattered sums of a pass through a block, forward or of the gradients of inputs."""
LEAST_SHOWN = 0.25
"""The share of what a backward pass sends that weight gradients never hide."""


def tensor_seconds(
    work: CostInputs, hidden: Num, pairs: Sequence[LayerPair | None]
) -> tuple[Num, Num]:
    """Return what a block waits for its tensor ranks, forward and in backward.

    `hidden` are the seconds of weight gradients that backward has for it. Of each branch of the
    block `pairs` has the columns, None where it does not compute in chunks.
    """
    forward, backward = tensor_exchange(work)
    shown = np.maximum(LEAST_SHOWN * backward, backward - hidden)
    chunked = np.asarray(work.layout.tp_overlap * work.layout.sequence_parallel) > 0
    if not chunked.any():
        return forward, shown
    each = forward / EXCHANGES
    model, first, second = work.model, 0.0 * forward, 0.0 * forward
    # What is left is sent at once: inputs for the gradients of weights.
    rest = backward - EXCHANGES * each
    for pair in pairs:
        if pair is None:
            first, rest = first + 2.0 * each, rest + 2.0 * each
            continue
        out, back = pair
        first = first + shown_in_chunks(work, model.hidden, out)
        first = first + shown_in_chunks(work, back, model.hidden)
        second = second + shown_in_chunks(work, out, model.hidden)
        second = second + shown_in_chunks(work, model.hidden, back)
    second = second + np.maximum(LEAST_SHOWN * rest, rest - hidden)
    return np.where(chunked, first, forward), np.where(chunked, second, shown)


def shown_in_chunks(work: CostInputs, depth: Num, columns: Num) -> Num:
    """Return what shows of an exchange beside a product of all tokens of so many columns."""
    tp, machine = work.layout.tp, work.machine
    whole = matmul_seconds(machine, work.tokens, depth, columns, work.element)
    chunk = matmul_seconds(machine, work.tokens / tp, depth, columns, work.element)
    rows = work.element * work.tokens / tp * work.model.hidden
    message = point_to_point_seconds(pairwise_group_links(work, tp, 1.0), rows)
    slowed = work.software.interference * np.minimum(message, chunk)
    steps = (tp - 1.0) * (np.maximum(message, chunk) + slowed)
    return np.maximum(0.0, chunk + steps - whole)


def chunk_kernels(work: CostInputs) -> Num:
    """Return how many kernels more a pass has whose products are done in chunks."""
    layout = work.layout
    chunked = layout.tp_overlap * layout.sequence_parallel
    return chunked * EXCHANGES * STEP_KERNELS * np.maximum(layout.tp - 1.0, 0.0)
