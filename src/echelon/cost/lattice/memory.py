"""Bytes that the fullest rank holds, by term, for arrays of plans.

Two ranks can be the fullest: the first of a pipeline, which has most microbatches in flight, and
the last, which has the logits. Both are computed, and the larger is told. A block keeps for
backward (Korthikanti et al., 2022, section 4.1, with elements of 2 bytes):

    of the residual stream  N h (8 + 2 dropout) / (t under sequence parallelism)
    of attention            N (4 query_dim + 4 kv_dim) / t, and N heads length (2 + 3 dropout) / t
                            where no fused kernel spares the scores
    of the MLP              N ffn (2 + 2 up) / t; of experts: of each row that a token sends

With "full" recompute only N h 2 bytes, and what one block keeps, once. A block that runs backward
has gradients of what it kept, and buffers of a trainer: so many bytes for each token and width. The
head keeps logits of the last microbatch, widened, and their gradient. Where backward is split, the
last rank has what waits for W (`waiting.py`) where that is more.
"""

from __future__ import annotations

import numpy as np

from echelon.cost.lattice.block import Work
from echelon.cost.lattice.numbers import Num, ceil_div
from echelon.cost.lattice.pipeline import in_flight, schedule_is
from echelon.cost.lattice.terms import Terms
from echelon.cost.lattice.waiting import waiting_bytes
from echelon.cost.lattice.weights import (
    block_weights,
    both_ends,
    embedding_weights,
    head_weights,
)


def bytes_of_rank(work: Work) -> Terms:
    """Return what the fullest rank holds at its peak."""
    first = _terms(work, last=False)
    alone = np.asarray(work.layout.pp) == 1.0
    last = _terms(work, last=True)
    fuller = (sum(last.values()) > sum(first.values())) | alone
    return Terms(terms={name: np.where(fuller, last[name], first[name]) for name in first})


def kept_by_block(work: Work, *, mixture: bool) -> Num:
    """Return the bytes that a block keeps of one microbatch for its backward pass."""
    model, layout, software = work.model, work.layout, work.software
    tokens, tp = work.tokens, layout.tp
    stream = np.where(np.asarray(layout.sequence_parallel) > 0, tp, 1.0)
    # Products in fp8 keep their inputs in fp8.
    narrow = np.asarray(work.machine.peak_flops) > work.machine.attention_flops
    into = np.where(narrow, 1.0, work.element)
    kept = model.hidden * (2.0 * work.element + 2.0 * into + 2.0 * software.dropout) / stream
    latent = np.asarray(model.kv_rank) > 0
    keys = np.where(latent, model.kv_up_dim, 2.0 * model.kv_dim)
    kept = kept + work.element * (2.0 * model.query_dim + keys) / tp
    plain = (1.0 - software.fused_attention) * (1.0 - layout.selective)
    scores = model.heads * model.length / tp
    kept = kept + plain * scores * (2.0 * work.element + software.dropout)
    if mixture:
        rows = model.top_k + model.shared_experts
        inner = rows * model.expert_ffn * (into + work.element * model.up) / tp
        inner = inner + 2.0 * work.element * _routed(work)
    else:
        inner = model.ffn * (into + work.element * model.up) / tp
    return tokens * (kept + inner)


def _routed(work: Work) -> Num:
    """Return the elements of a token's rows on a tensor rank: pieces of experts need every row."""
    model, layout = work.model, work.layout
    return model.top_k * model.hidden * layout.expert_tp / layout.tp


def _row_gradients(work: Work) -> Num:
    """Return the gradients of rows, and of what is inside their experts, while they run back."""
    model = work.model
    inner = model.top_k * model.expert_ffn * (1.0 + model.up) / work.layout.tp
    return work.element * work.tokens * (2.0 * _routed(work) + inner)


def _terms(work: Work, *, last: bool) -> dict[str, Num]:
    model, layout, software = work.model, work.layout, work.software
    alone = np.asarray(layout.pp) == 1.0
    layers = ceil_div(model.layers, layout.pp)
    mixtures = np.minimum(model.mixture_layers, layers)
    plain = layers - mixtures
    dense = block_weights(model, layout, mixture=False)
    expert = block_weights(model, layout, mixture=True)
    embedding, head = embedding_weights(model, layout), head_weights(model, layout)
    two = schedule_is(layout, "dualpipe")
    bent = schedule_is(layout, "zb-v", "dualpipe-v")
    # The first rank of a V has both ends, and of two pipelines that cross, two stages.
    both = alone | two | bent
    last_end = np.where(bent, 0.0, head) if last else embedding
    ends = np.where(both & ~(bent & last & ~alone), both_ends(model, layout), last_end)
    copies = np.where(two, 2.0, 1.0)
    shared = copies * (plain * dense.shared + mixtures * expert.shared) + ends
    routed = copies * mixtures * expert.routed
    zero = np.asarray(layout.zero)
    inner = layout.ep * layout.expert_tp
    cut = np.maximum(1.0, layout.tp * layout.shard / inner)

    def sliced(stage: float) -> Num:
        return np.where(zero >= stage, shared / layout.shard + routed / cut, shared + routed)

    unit = np.maximum(np.maximum(dense.shared, expert.shared), ends)
    gathered = np.where(zero >= 3, unit * (2.0 * work.element + software.gradient_bytes), 0.0)
    stays = (zero >= 3) & (np.asarray(layout.reshard) == 0)
    gathered = gathered + np.where(stays, work.element * (shared + routed), 0.0)
    stream = np.where(np.asarray(layout.sequence_parallel) > 0, layout.tp, 1.0)
    flying = in_flight(layout)
    if last:
        # The last rank of a straight pipeline has one microbatch at a time in it.
        one = np.minimum(flying, np.maximum(1.0, flying - layout.pp + 1.0))
        flying = np.where(alone, np.minimum(1.0, flying), one)
    whole = kept_by_block(work, mixture=False)
    mixed = kept_by_block(work, mixture=True)
    inputs = work.element * work.tokens * model.hidden / stream
    again = np.asarray(layout.recompute)
    every = plain * whole + mixtures * mixed
    working = np.where(np.asarray(mixtures) > 0, np.maximum(whole, mixed), whole)
    kept = flying * ((1.0 - again) * every + again * layers * inputs)
    if last:
        kept = np.maximum(kept, waiting_bytes(work, plain, mixtures))
    running = np.where(again > 0, working, 0.0)
    running = running + software.working_width * work.tokens * model.hidden
    running = running + np.where(np.asarray(mixtures) > 0, _row_gradients(work), 0.0)
    logits = work.tokens * model.vocab / layout.tp * software.logit_held
    terms: dict[str, Num] = {
        "parameters": work.element * sliced(3.0),
        "gradients": software.gradient_bytes * sliced(2.0),
        "optimizer": np.where(np.asarray(layout.offload) > 0, 0.0, software.state_bytes)
        * sliced(1.0),
        "gathered": gathered,
        "activations": kept,
        "working": running,
        "logits": np.where(both | bool(last), logits, 0.0),
        "buffers": 2.0 * inputs * np.where(alone, 1.0, 2.0),
    }
    # The optimizer's buffers are there when those of backward are gone.
    passing = kept + running + terms["logits"] + terms["gathered"] + terms["buffers"]
    terms["update"] = np.maximum(0.0, software.update_bytes * sliced(1.0) - passing)
    used: Num = 0.0
    for held in terms.values():
        used = used + held
    terms["slack"] = software.slack * used
    terms["context"] = software.context_bytes + 0.0 * used
    return terms
