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

from echelon.cost.lattice.block import BlockSeconds, Work, block_seconds
from echelon.cost.lattice.data import (
    Held,
    adding_seconds,
    gather_of_unit,
    step_travel,
    update_seconds,
)
from echelon.cost.lattice.ends import EndSeconds, end_seconds
from echelon.cost.lattice.numbers import Num, ceil_div
from echelon.cost.lattice.pipeline import idle_seconds, schedule_is
from echelon.cost.lattice.terms import Terms
from echelon.cost.lattice.travel import gather_seconds, message_seconds, way_of
from echelon.cost.lattice.weights import (
    block_weights,
    both_ends,
    embedding_weights,
    head_weights,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Give the seconds of the blocks of a model: dense ones, and mixtures where there are any."""

    dense: BlockSeconds
    mixture: BlockSeconds
    ends: EndSeconds


def blocks_of(work: Work) -> Blocks:
    """Return the seconds of every kind of block: what plans of one shard have in common."""
    dense = block_seconds(work, mixture=False)
    some = bool((np.asarray(work.model.experts) > 0).any())
    mixture = block_seconds(work, mixture=True) if some else dense
    return Blocks(dense=dense, mixture=mixture, ends=end_seconds(work))


def step_seconds(work: Work, blocks: Blocks | None = None) -> Terms:
    """Return the seconds of a step, by term."""
    blocks = blocks_of(work) if blocks is None else blocks
    model, layout, software = work.model, work.layout, work.software
    m = layout.microbatches
    on_rank = ceil_div(model.layers, layout.pp)
    # The share of a rank's blocks that are mixtures: dense ones come first, mixtures set the pace.
    mixtures = np.minimum(model.mixture_layers, on_rank)
    plain = on_rank - mixtures
    part = _Parts(work, blocks, plain, mixtures)
    ends = _ends(work, blocks)
    last = np.where(
        np.asarray(layout.pp) > 1.0, model.layers - on_rank * (layout.pp - 1.0), on_rank
    )
    spare = np.maximum(on_rank - last, 0.0) / on_rank
    each = part.forward + part.inputs + part.weights
    # A last stage with fewer blocks has room for the head; else the head sets the pace.
    head = np.maximum(0.0, ends - np.minimum(spare, 1.0) * each)
    idle = idle_seconds(layout, part.forward, part.inputs, part.weights)
    idle = idle + np.where(np.asarray(layout.pp) > 1.0, ends - head, 0.0)
    head, idle = _on_shared_cores(work, m * each, m * head, m * ends, idle)
    held = held_weights(work, plain, mixtures)
    gather, scatter = _stage_three(work, blocks, plain, mixtures)
    messages = _messages(work)
    reduce, regather = step_travel(work, held)
    cut_whole = np.asarray(layout.zero) >= 3.0
    # At stage 2 gradients are scattered after every microbatch, at 0 and 1 once.
    times = np.where(np.asarray(layout.zero) == 2.0, m, 1.0)
    window = software.reduce_overlap * (part.inputs + part.weights)
    shown = times * np.maximum(0.05 * reduce, reduce - window)
    terms: dict[str, Num] = {
        "products": m * part.products,
        "attention": m * part.attention,
        "memory": m * part.moves,
        "host": m * part.host,
        "head": head,
        "recompute": m * part.again,
        "tensor": m * part.tensor,
        "context": m * part.context,
        "expert": m * part.expert,
        "messages": messages,
        "bubble": idle,
        "gather": np.where(cut_whole, gather, (1.0 - software.reduce_overlap) * regather),
        "gradients": np.where(cut_whole, scatter, shown),
        "adding": m * adding_seconds(work, held),
        "optimizer": update_seconds(work, held),
        "rest": software.step_s + 0.0 * m,
    }
    busy = ("products", "attention", "memory", "host", "head", "recompute")
    ranks = np.maximum(layout.dp * layout.cp, 1.0)
    late = software.spread * np.sqrt(2.0 * np.log(ranks))
    terms["stragglers"] = late * sum((terms[name] for name in busy), 0.0)
    return Terms(terms=terms)


def _on_shared_cores(work: Work, blocks: Num, head: Num, ends: Num, idle: Num) -> tuple[Num, Num]:
    """Return the seconds of the head and of waiting, where ranks that wait leave cores to others.

    A step is as long as the longest chain of it at the speed of a whole core, or as all of the work
    takes on the cores, whichever is longer (the two bounds of Graham, 1966); of the ends of a model
    each pipeline rank's cores do a part.
    """
    share = np.asarray(work.machine.share)
    mine = np.where(share < 1.0, ends / work.layout.pp, head)
    longest = share * (blocks + head + idle)
    return mine, np.maximum(0.0, longest - blocks - mine)


def held_weights(work: Work, plain: Num, mixtures: Num) -> Held:
    """Return the weights of the pipeline rank that holds most."""
    dense = block_weights(work.model, work.layout, mixture=False)
    expert = block_weights(work.model, work.layout, mixture=True)
    head = head_weights(work.model, work.layout)
    embedding = embedding_weights(work.model, work.layout)
    alone = np.asarray(work.layout.pp) == 1.0
    both = both_ends(work.model, work.layout)
    # Of two pipelines that cross a rank has two stages.
    two = schedule_is(work.layout, "dualpipe")
    copies = np.where(two, 2.0, 1.0)
    bent = schedule_is(work.layout, "zb-v", "dualpipe-v")
    return Held(
        blocks=copies * (plain * dense.shared + mixtures * expert.shared),
        routed=copies * mixtures * expert.routed,
        ends=np.where(alone | two | bent, both, np.maximum(embedding, head)),
        layers=plain + mixtures,
    )


class _Parts:
    """Add up what the blocks of a rank take for one microbatch."""

    def __init__(self, work: Work, blocks: Blocks, plain: Num, mixtures: Num) -> None:
        def both(name: str, which: str) -> Num:
            first = getattr(getattr(blocks.dense, which), name)
            second = getattr(getattr(blocks.mixture, which), name)
            return plain * first + mixtures * second

        layout = work.layout
        self.weights = plain * blocks.dense.weights + mixtures * blocks.mixture.weights
        self.products = both("products", "forward") + both("products", "inputs") + self.weights
        self.attention = both("attention", "forward") + both("attention", "inputs")
        self.moves = both("moves", "forward") + both("moves", "inputs")
        self.host = both("host", "forward") + both("host", "inputs")
        self.tensor = both("tensor", "forward") + both("tensor", "inputs")
        self.context = both("context", "forward") + both("context", "inputs")
        self.expert = both("expert", "forward") + both("expert", "inputs")
        core = both("attention", "forward")
        self.again = layout.recompute * both("total", "forward")
        self.again = self.again + layout.selective * (1.0 - layout.recompute) * core
        self.forward = both("total", "forward")
        self.inputs = both("total", "inputs") + self.again


def _ends(work: Work, blocks: Blocks) -> Num:
    """Return the seconds of the ends on the rank that has most of them."""
    ends = blocks.ends
    head = ends.head_forward + ends.head_backward
    alone = np.asarray(work.layout.pp) == 1.0
    return np.where(alone, head + ends.embedding, head)


def _stage_three(work: Work, blocks: Blocks, plain: Num, mixtures: Num) -> tuple[Num, Num]:
    """Return what a step waits for gathers, and for scattered gradients, at ZeRO-3."""
    layout, software, m = work.layout, work.software, work.layout.microbatches
    waits: Num = 0.0
    last: Num = 0.0
    for count, seconds, mixture in (
        (plain, blocks.dense, False),
        (mixtures, blocks.mixture, True),
    ):
        weights = block_weights(work.model, layout, mixture=mixture)
        gather, scatter = gather_of_unit(work, weights.shared, weights.routed)
        forward = seconds.forward.total
        backward = seconds.inputs.total + seconds.weights + layout.recompute * forward
        hidden = software.gather_overlap
        once = np.maximum(gather - hidden * forward, 0.0)
        again = layout.reshard * gather + scatter
        back = np.maximum(again - hidden * backward, 0.0)
        slowed = software.interference * (np.minimum(gather, forward) + np.minimum(again, backward))
        waits = waits + count * (once + back + slowed)
        last = np.maximum(last, np.where(np.asarray(count) > 0, gather + scatter, 0.0))
    ends = both_ends(work.model, layout)
    gather, scatter = gather_of_unit(work, ends, 0.0)
    return m * (waits + 0.5 * (gather + last)), m * 0.5 * scatter


def _messages(work: Work) -> Num:
    """Return what a step waits for messages between stages."""
    layout, software = work.layout, work.software
    split = np.maximum(
        np.where(np.asarray(layout.sequence_parallel) > 0, layout.tp, 1.0),
        np.where(np.asarray(software.scattered_messages) > 0, layout.tp, 1.0),
    )
    way = way_of(work.machine, layout.pp, layout.tp * layout.cp * layout.dp)
    rows = work.element * work.tokens * work.model.hidden
    one = message_seconds(way, rows / split)
    node = way_of(work.machine, layout.tp, 1.0)
    joined = np.where(np.asarray(layout.sequence_parallel) > 0, 0.0, 1.0)
    from_parts = joined * np.where(np.asarray(split) > 1.0, 1.0, 0.0)
    one = one + from_parts * gather_seconds(node, rows)
    steady = 2.0 * layout.virtual * layout.microbatches * (1.0 - software.pipeline_overlap)
    fill = 2.0 * (layout.pp - 1.0)
    return np.where(np.asarray(layout.pp) > 1.0, one * (steady + fill), 0.0)
