# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step: the terms, which add up to the whole exactly.

A rank works on m microbatches; the rank with most work sets the pace, and a schedule's closed form
says how long it waits (`pipeline.py`). Gradients travel behind the backward pass of the last
microbatch as far as a trainer overlaps them. Ranks that add up gradients wait for the slowest: of n
whose times vary by a share s, that is s sqrt(2 ln n) later than the mean (the expected largest of n
normal variables).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echelon.cost.bytes.model_sizes import (
    block_weights,
    embedding_and_head_weights,
    embedding_weights,
    head_weights,
)
from echelon.cost.inputs.cost_inputs import CostInputs, Terms, group_link_numbers
from echelon.cost.inputs.numbers import Num, ceil_div
from echelon.cost.inputs.pipeline import bubble_seconds, crosses_itself, has_both_ends
from echelon.cost.seconds.block import BlockSeconds, EndSeconds, block_seconds, end_seconds
from echelon.cost.seconds.collectives import all_gather_seconds, point_to_point_seconds
from echelon.cost.seconds.data import (
    HeldWeights,
    accumulation_seconds,
    node_gather_seconds,
    outer_seconds,
    step_collective_seconds,
    unit_gather_seconds,
    update_seconds,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKindSeconds:
    """Give the seconds of the blocks of a model: dense ones, and mixtures where there are any."""

    dense: BlockSeconds
    experts: BlockSeconds
    ends: EndSeconds


def block_kind_seconds(work: CostInputs) -> BlockKindSeconds:
    """Return the seconds of every kind of block: what plans of one shard have in common."""
    dense = block_seconds(work, mixture=False)
    some = bool((np.asarray(work.model.experts) > 0).any())
    mixture = block_seconds(work, mixture=True) if some else dense
    return BlockKindSeconds(dense=dense, experts=mixture, ends=end_seconds(work))


def step_seconds(work: CostInputs, blocks: BlockKindSeconds | None = None) -> Terms:
    """Return the seconds of a step, by term."""
    blocks = block_kind_seconds(work) if blocks is None else blocks
    model, layout, software = work.model, work.layout, work.software
    m = layout.microbatches
    on_rank = ceil_div(model.layers, layout.pp)
    # The share of a rank's blocks that are mixtures: dense ones come first, mixtures set the pace.
    mixtures = np.minimum(model.mixture_layers, on_rank)
    plain = on_rank - mixtures
    part = _MicrobatchSums(work, blocks, plain, mixtures)
    ends = _ends(work, blocks)
    last = np.where(
        np.asarray(layout.pp) > 1.0, model.layers - on_rank * (layout.pp - 1.0), on_rank
    )
    spare = np.maximum(on_rank - last, 0.0) / on_rank
    each = part.forward + part.inputs + part.weights
    # A last stage with fewer blocks has room for the head; else the head sets the pace.
    head = np.maximum(0.0, ends - np.minimum(spare, 1.0) * each)
    idle = bubble_seconds(layout, part.forward, part.inputs, part.weights)
    idle = idle + np.where(np.asarray(layout.pp) > 1.0, ends - head, 0.0)
    head, idle = _on_shared_cores(work, m * each, m * head, m * ends, idle)
    held = fullest_rank_weights(work, plain, mixtures)
    cut_whole = np.asarray(layout.zero) >= 3.0
    gather, scatter = 0.0, 0.0
    if np.any(cut_whole):
        gather, scatter = _stage_three(work, blocks, plain, mixtures)
    messages = _messages(work)
    pace = software.pace
    reduce, regather = (pace * one for one in step_collective_seconds(work, held))
    # At stage 2 gradients are scattered after every microbatch, at 0 and 1 once.
    times = np.where(np.asarray(layout.zero) == 2.0, m, 1.0)
    # Workers have nothing to do until servers have sent the parameters.
    served = np.asarray(layout.servers) > 0.0
    regather_shown = np.where(served, 1.0, 1.0 - software.reduce_overlap)
    window = software.reduce_overlap * (part.inputs + part.weights)
    shown = times * np.maximum(0.05 * reduce, reduce - window)
    terms: dict[str, Num] = {
        "matmul": m * part.products,
        "attention": m * part.attention,
        "memory": m * part.moves,
        "host": m * part.host,
        "head": head,
        "recompute": m * part.again,
        "tensor": m * part.tensor,
        "context": m * part.context,
        "expert": m * part.expert,
        "messages": pace * messages,
        "bubble": idle,
        "gather": np.where(cut_whole, gather, regather_shown * regather),
        "gradients": np.where(cut_whole, scatter, shown),
        "adding": pace * m * accumulation_seconds(work, held),
        "optimizer": update_seconds(work, held),
        "fixed": pace * software.step_s + 0.0 * m,
    }
    busy = ("matmul", "attention", "memory", "host", "head", "recompute")
    ranks = np.maximum(layout.dp_together * layout.cp, 1.0)
    late = software.spread * np.sqrt(2.0 * np.log(ranks))
    terms["stragglers"] = late * sum((terms[name] for name in busy), 0.0)
    if np.any(layout.apart):
        terms["outer"] = outer_seconds(work, held, sum(terms.values(), 0.0))
    return Terms(terms=terms)


def _on_shared_cores(
    work: CostInputs, blocks: Num, head: Num, ends: Num, idle: Num
) -> tuple[Num, Num]:
    """Return the seconds of the head and of waiting, where ranks that wait leave cores to others.

    A step is as long as the longest chain of it at the speed of a whole core, or as all of the work
    takes on the cores, whichever is longer (the two bounds of Graham, 1966); of the ends of a model
    each pipeline rank's cores do a part.
    """
    share = np.asarray(work.machine.share)
    mine = np.where(share < 1.0, ends / work.layout.pp, head)
    longest = share * (blocks + head + idle)
    return mine, np.maximum(0.0, longest - blocks - mine)


def fullest_rank_weights(work: CostInputs, plain: Num, mixtures: Num) -> HeldWeights:
    """Return the weights of the pipeline rank that holds most."""
    dense, _ = block_weights(work.model, work.layout, mixture=False)
    mixed, routed = block_weights(work.model, work.layout, mixture=True)
    head = head_weights(work.model, work.layout)
    embedding = embedding_weights(work.model, work.layout)
    alone = np.asarray(work.layout.pp) == 1.0
    both = embedding_and_head_weights(work.model, work.layout)
    # Of two pipelines that cross a rank has two stages.
    two = crosses_itself(work.layout)
    copies = np.where(two, 2.0, 1.0)
    bent = has_both_ends(work.layout)
    return HeldWeights(
        blocks=copies * (plain * dense + mixtures * mixed),
        routed=copies * mixtures * routed,
        ends=np.where(alone | two | bent, both, np.maximum(embedding, head)),
    )


class _MicrobatchSums:
    """Add up what the blocks of a rank take for one microbatch."""

    def __init__(
        self, work: CostInputs, blocks: BlockKindSeconds, plain: Num, mixtures: Num
    ) -> None:
        dense, experts, layout = blocks.dense, blocks.experts, work.layout

        def forward(name: str) -> Num:
            first, second = getattr(dense.forward, name), getattr(experts.forward, name)
            return plain * first + mixtures * second

        def inputs(name: str) -> Num:
            first, second = dense.input_gradients, experts.input_gradients
            return plain * getattr(first, name) + mixtures * getattr(second, name)

        def both(name: str) -> Num:
            return forward(name) + inputs(name)

        self.weights = plain * dense.weight_gradients + mixtures * experts.weight_gradients
        self.products = both("matmul") + self.weights
        self.attention, self.moves, self.host = map(both, ("attention", "memory_bound", "host"))
        self.tensor, self.context, self.expert = map(both, ("tensor", "context", "expert"))
        self.again = layout.recompute * forward("total")
        operators = plain * dense.again.of_layout(layout)
        operators = operators + mixtures * experts.again.of_layout(layout)
        self.again = self.again + (1.0 - layout.recompute) * operators
        self.forward = forward("total")
        self.inputs = inputs("total") + self.again


def _ends(work: CostInputs, blocks: BlockKindSeconds) -> Num:
    """Return the seconds of the ends on the rank that has most of them."""
    ends = blocks.ends
    head = ends.head_forward + ends.head_backward
    alone = np.asarray(work.layout.pp) == 1.0
    return np.where(alone, head + ends.embedding, head)


def _stage_three(
    work: CostInputs, blocks: BlockKindSeconds, plain: Num, mixtures: Num
) -> tuple[Num, Num]:
    """Return what a step waits for gathers, and for scattered gradients, at ZeRO-3."""
    layout, software, m = work.layout, work.software, work.layout.microbatches
    waits: Num = 0.0
    last: Num = 0.0
    for count, seconds, mixture in ((plain, blocks.dense, False), (mixtures, blocks.experts, True)):
        weights = block_weights(work.model, layout, mixture=mixture)
        gather, scatter = (software.pace * one for one in unit_gather_seconds(work, *weights))
        forward = seconds.forward.total
        backward = (
            seconds.input_gradients.total + seconds.weight_gradients + layout.recompute * forward
        )
        near = software.pace * node_gather_seconds(work, *weights, far=gather / software.pace)
        hidden = software.gather_overlap
        # The first microbatch has its parameters from all nodes, those after it from their own.
        once = np.maximum(gather - hidden * forward, 0.0) / m
        once = once + np.maximum(near - hidden * forward, 0.0) * (m - 1.0) / m
        again = layout.reshard * near + scatter
        back = np.maximum(again - hidden * backward, 0.0)
        slowed = software.interference * (np.minimum(gather, forward) + np.minimum(again, backward))
        waits = waits + count * (once + back + slowed + _hooks(work, seconds))
        last = np.maximum(last, np.where(np.asarray(count) > 0, gather + scatter, 0.0))
    ends = embedding_and_head_weights(work.model, layout)
    end = unit_gather_seconds(work, ends, 0.0, is_block=False)
    gather, scatter = (software.pace * one for one in end)
    return m * (waits + 0.5 * (gather + last)), m * 0.5 * scatter


def _hooks(work: CostInputs, seconds: BlockSeconds) -> Num:
    """Return what a block waits for a host that gathers and frees its parameters, in all passes."""
    first, second = seconds.forward, seconds.input_gradients
    hook = work.software.pace * work.software.hook_s
    shown = np.maximum(0.0, hook - first.room)
    back = np.maximum(0.0, hook - second.room)
    return (1.0 + work.layout.recompute) * shown + back


def _messages(work: CostInputs) -> Num:
    """Return what a step waits for messages between stages."""
    layout, software = work.layout, work.software
    one = message_between_stages(work)
    steady = 2.0 * layout.virtual * layout.microbatches * (1.0 - software.pipeline_overlap)
    fill = 2.0 * (layout.pp - 1.0)
    return np.where(np.asarray(layout.pp) > 1.0, one * (steady + fill), 0.0)


def message_between_stages(work: CostInputs) -> Num:
    """Return the seconds of one message of a microbatch from a stage to the next."""
    layout, software = work.layout, work.software
    split = np.maximum(
        np.where(np.asarray(layout.sequence_parallel) > 0, layout.tp, 1.0),
        np.where(np.asarray(software.scattered_messages) > 0, layout.tp, 1.0),
    )
    way = group_link_numbers(work.machine, layout.pp, layout.tp * layout.cp * layout.dp_together)
    rows = work.element * work.tokens * work.model.hidden
    node = group_link_numbers(work.machine, layout.tp, 1.0)
    joined = np.where(np.asarray(layout.sequence_parallel) > 0, 0.0, 1.0)
    from_parts = joined * np.where(np.asarray(split) > 1.0, 1.0, 0.0)
    return point_to_point_seconds(way, rows / split) + from_parts * all_gather_seconds(node, rows)
