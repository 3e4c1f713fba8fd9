# SPDX-License-Identifier: Apache-2.0
"""Weights of a rank, and bytes that the fullest one holds, by term, for arrays of plans.

Matrices are cut by tensor parallelism, norms are not; latent attention leads down to vectors that
every tensor rank has whole (DeepSeek-V2, 2024, section 2.1). Routed experts are shared out over ep,
and cut over expert_tp.

Two ranks can be the fullest: the first of a pipeline, which has most microbatches in flight, and
the last, which has the logits. Both are computed, and the larger is told. What a block keeps for
backward, `cost/activations/closed_forms.py` says; with "full" recompute it is only N h 2 bytes, and
what one block keeps, once. A block that runs backward has gradients of what it kept, and buffers of
a trainer: so many bytes for each token and width. The head has logits of one microbatch.

Where backward is split, a linear layer keeps its input and the gradient of its output from B until
W uses both (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 3), whether its block was
recomputed or not; the last rank has what waits for W where that is more. A block of N tokens, in
elements, cut over t tensor ranks, D / t of a stream that is cut:

    attention   D (split) + (2 query_dim + 2 kv_dim) / t + D
    latent      the same with its way down to vectors and up again, the way down not cut
    MLP         D (split) + ffn (1 + up) / t + D; of experts: of each row that a token sends

How many microbatches wait, of all layers of the last rank, each schedule says:
`ClosedForms.waiting`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from echelon.cost.activations.closed_forms import BlockKindBytes, block_kind_bytes
from echelon.cost.bytes.model_sizes import (
    block_weights,
    embedding_and_head_weights,
    embedding_weights,
    head_weights,
    node_slice_weights,
)
from echelon.cost.bytes.nccl import nccl_bytes
from echelon.cost.inputs.cost_inputs import CostInputs, Terms
from echelon.cost.inputs.numbers import LayoutNumbers, Num, ceil_div
from echelon.cost.inputs.pipeline import (
    crosses_itself,
    has_both_ends,
    microbatches_in_flight,
    microbatches_that_wait,
)

WHOLE_STAGE = 3.0
"""The stage of ZeRO that cuts parameters, too."""


def fullest_rank_bytes(
    work: CostInputs, blocks: BlockKindBytes | None = None, ends: PipelineEnds | None = None
) -> Terms:
    """Return what the fullest rank holds at its peak; `blocks` and `ends` are those of `work`."""
    ends = pipeline_ends(work) if ends is None else ends
    blocks = block_kind_bytes(work) if blocks is None else blocks
    loss, alone = blocks.loss.of_layout(work.layout), np.asarray(work.layout.pp) == 1.0
    last = _terms(work, blocks, ends, loss, last=True)
    if np.all(alone):
        return Terms(terms=last)
    first = _terms(work, blocks, ends, loss, last=False)
    fuller = (sum(last.values()) > sum(first.values())) | alone
    return Terms(terms={name: np.where(fuller, last[name], first[name]) for name in first})


def rank_bytes(work: CostInputs, *, last: bool) -> Terms:
    """Return what the first or the last rank of a pipeline holds at its peak."""
    blocks = block_kind_bytes(work)
    loss = blocks.loss.of_layout(work.layout)
    return Terms(terms=_terms(work, blocks, pipeline_ends(work), loss, last=last))


def _routed(work: CostInputs) -> Num:
    """Return the elements of a token's rows on a tensor rank: pieces of experts need every row."""
    model, layout = work.model, work.layout
    return model.top_k * model.hidden * layout.expert_tp / layout.tp


def _row_gradients(work: CostInputs) -> Num:
    """Return the gradients of rows, and of what is inside their experts, while they run back."""
    model = work.model
    inner = model.top_k * model.expert_ffn * (1.0 + model.up) / work.layout.tp
    return work.element * work.tokens * (2.0 * _routed(work) + inner)


def _terms(
    work: CostInputs, blocks: BlockKindBytes, ends: PipelineEnds, loss: Num, *, last: bool
) -> dict[str, Num]:
    """Return what the first or the last rank of a pipeline holds at its peak."""
    software, held = work.software, ends.last if last else ends.first
    terms = _weight_terms(work, held)
    logits = np.where((np.asarray(held.both) > 0) | last, loss, 0.0)
    terms |= _activation_terms(work, held, blocks, ends.in_flight, logits, last=last)
    running = terms.pop("running")
    terms = _with_step(work, held, terms, running)
    used = sum(terms.values(), 0.0)
    terms["slack"] = software.slack * used
    terms["context"] = software.context_bytes + 0.0 * used
    if np.any(np.asarray(software.connection_bytes) > 0.0):
        terms["nccl"] = ends.nccl + 0.0 * used
    return terms


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOfRank:
    """Give the blocks of a rank, and the weights that it has; those of routed experts apart."""

    plain: Num
    """Blocks with a dense MLP."""
    mixtures: Num
    """Blocks that are mixtures of experts."""
    shared: Num
    """Weights but those of routed experts."""
    routed: Num
    """Weights of routed experts."""
    block: Num
    """Weights of the largest block."""
    ends: Num
    """Weights of the embedding and the head that are here."""
    both: Num
    """Flag: both ends of the model are here."""
    trained: Num
    """Weights of `shared` that are trained: all, or those of adapters."""
    trained_routed: Num
    """Weights of `routed` that are."""

    @property
    def unit(self) -> Num:
        """Return the weights of the largest block, or of the ends."""
        return np.maximum(self.block, self.ends)

    @property
    def layers(self) -> Num:
        """Return the number of blocks."""
        return self.plain + self.mixtures

    def sliced(self, layout: LayoutNumbers, stage: float) -> Num:
        """Return how many weights are held of what ZeRO cuts from `stage` on: 1 and 2 of trained
        ones, 3 of all."""
        shared, routed = self.shared, self.routed
        if stage < WHOLE_STAGE:
            shared, routed = self.trained, self.trained_routed
        cut = shared / layout.shard + routed / layout.expert_shard
        return np.where(np.asarray(layout.zero) >= stage, cut, shared + routed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineEnds:
    """Hold what plans have in common that differ in nothing but recompute, or the stage of ZeRO.

    That is, the stage where anything is cut: without, a rank has fewer communicators.
    """

    first: HeldOfRank
    last: HeldOfRank
    in_flight: Num
    """Microbatches of the fullest rank."""
    nccl: Num
    """Bytes of the communicators of a rank."""


def pipeline_ends(work: CostInputs) -> PipelineEnds:
    """Return the weights of the first and the last rank, and what else they have in common."""
    last = _held_weights(work, last=True)
    alone = np.all(np.asarray(work.layout.pp) == 1.0)
    connects = np.any(np.asarray(work.software.connection_bytes) > 0.0)
    return PipelineEnds(
        first=last if alone else _held_weights(work, last=False),
        last=last,
        in_flight=microbatches_in_flight(work.layout),
        nccl=nccl_bytes(work) if connects else 0.0,
    )


def _held_weights(work: CostInputs, *, last: bool) -> HeldOfRank:
    model, layout = work.model, work.layout
    alone = np.asarray(layout.pp) == 1.0
    layers = _blocks_of_rank(work, last=last)
    mixtures = np.minimum(model.mixture_layers, layers)
    plain = layers - mixtures
    dense, _ = block_weights(model, layout, mixture=False)
    mixed, experts = block_weights(model, layout, mixture=True)
    embedding, head = embedding_weights(model, layout), head_weights(model, layout)
    two = crosses_itself(layout)
    bent = has_both_ends(layout)
    # The first rank of a V has both ends, and of two pipelines that cross, two stages.
    both = alone | two | bent
    last_end = np.where(bent, 0.0, head) if last else embedding
    ends = np.where(
        both & ~(bent & last & ~alone), embedding_and_head_weights(model, layout), last_end
    )
    copies = np.where(two, 2.0, 1.0)
    shared = copies * (plain * dense + mixtures * mixed) + ends
    adapters = copies * layers * (model.adapters_whole + model.adapters_split / layout.tp)
    frozen = np.asarray(model.frozen) > 0
    return HeldOfRank(
        plain=plain,
        mixtures=mixtures,
        shared=shared,
        routed=copies * mixtures * experts,
        block=np.maximum(dense, mixed),
        ends=ends,
        both=both,
        trained=np.where(frozen, adapters, shared),
        trained_routed=np.where(frozen, 0.0, copies * mixtures * experts),
    )


def _blocks_of_rank(work: CostInputs, *, last: bool) -> Num:
    """Return the blocks of the first or the last rank.

    Where stages share out work, a stage ends with the block that takes it past its part, counted
    from the first on (module `models.base` of nanotron, build_model).
    """
    model, layout = work.model, work.layout
    alike = ceil_div(model.layers, layout.pp)
    if not np.any(np.asarray(work.software.balances_head) > 0):
        return alike
    block = model.hidden * (4.0 * model.query_dim + 3.0 * model.ffn)
    part = (model.layers + model.vocab * model.hidden / block) / layout.pp
    before = np.floor(part * (layout.pp - 1.0)) + 1.0
    here = np.maximum(0.0, model.layers - before) if last else np.floor(part) + 1.0
    shares = (np.asarray(work.software.balances_head) > 0) & (np.asarray(layout.pp) > 1.0)
    return np.where(shares, np.minimum(here, model.layers), alike)


def _weight_terms(work: CostInputs, held: HeldOfRank) -> dict[str, Num]:
    """Return what is held of weights whatever a microbatch is."""
    layout, software = work.layout, work.software
    zero, away = np.asarray(layout.zero), np.asarray(layout.offload) > 0
    near = np.asarray(layout.parameter_offload) == 0
    rest = np.asarray(software.parameter_bytes)
    rest = np.where(near, np.where(rest > 0, rest, work.element), 0.0)
    of_block = np.asarray(software.gathered_bytes)
    unit = held.unit * (2.0 * work.element + software.gradient_bytes)
    unit = np.where(of_block > 0, held.block * of_block + held.ends * work.element, unit)
    # Parameters in the host's memory come in units, too.
    gathered = np.where((zero >= 3) | ~near, unit, 0.0)
    stays = (zero >= 3) & (np.asarray(layout.reshard) == 0)
    gathered = gathered + np.where(stays, work.element * (held.shared + held.routed), 0.0)
    gone = np.where(away, software.offloads_gradients, 0.0)
    casts = software.cast_bytes * (1.0 - layout.recompute * np.asarray(software.late_gradients))
    return {
        "parameters": (rest + casts) * held.sliced(layout, 3.0)
        + work.element * node_slice_weights(work, held.shared, held.routed),
        "gradients": (1.0 - gone) * software.gradient_bytes * held.sliced(layout, 2.0),
        "optimizer": np.where(away, 0.0, software.state_bytes) * held.sliced(layout, 1.0),
        "gathered": gathered,
    }


def _activation_terms(
    work: CostInputs,
    held: HeldOfRank,
    blocks: BlockKindBytes,
    in_flight: Num,
    logits: Num,
    *,
    last: bool,
) -> dict[str, Num]:
    """Return what microbatches in flight keep, and what a block and the loss work with."""
    model, layout, software = work.model, work.layout, work.software
    alone = np.asarray(layout.pp) == 1.0
    stream = np.where(np.asarray(layout.sequence_parallel) > 0, layout.tp, 1.0)
    if last:
        # The last rank of a straight pipeline has one microbatch at a time in it.
        one = np.minimum(in_flight, np.maximum(1.0, in_flight - layout.pp + 1.0))
        # Of interleaved chunks it begins all but the last before it runs any backward
        # (module `pipeline_parallel.schedules` of Megatron-Core).
        chunks = np.asarray(layout.virtual)
        interleaved = (np.asarray(software.loss_apart) > 0) & (chunks > 2.0)
        begun = np.minimum(in_flight, layout.pp - (layout.pp - 1.0) / chunks)
        one = np.where(interleaved, begun, one)
        in_flight = np.where(alone, np.minimum(1.0, in_flight), one)
    plain, mixtures = held.plain, held.mixtures
    whole, with_experts = blocks.whole, blocks.with_experts
    inputs = work.element * work.tokens * model.hidden / stream
    again, by_op = np.asarray(layout.recompute), np.asarray(layout.per_op) > 0
    redone, redone_of_mixture = blocks.redone, blocks.redone_of_mixture
    every = plain * (whole - redone) + mixtures * (with_experts - redone_of_mixture)
    working = np.where(np.asarray(mixtures) > 0, np.maximum(whole, with_experts), whole)
    kept = in_flight * ((1.0 - again) * every + again * held.layers * inputs)
    if np.any(by_op):
        kept = np.where(by_op, in_flight * _kept_per_op(work, held), kept)
    if last:
        kept = np.maximum(kept, deferred_weight_gradient_bytes(work, plain, mixtures))
    kept = kept * (1.0 - np.asarray(software.saved_away))
    # What one block makes again is there while it runs backward.
    remade = np.where(np.asarray(mixtures) > 0, np.maximum(redone, redone_of_mixture), redone)
    running = np.where((again > 0) | by_op, working, remade)
    running = running + software.working_width * work.tokens * model.hidden
    running = running + software.working_inner * work.tokens * model.ffn / layout.tp
    running = running + np.where(np.asarray(mixtures) > 0, _row_gradients(work), 0.0)
    # Either way the loss has let go of its logits when the last block runs backward.
    apart = (np.asarray(software.loss_apart) > 0) | (np.asarray(software.loss_backward) > 0)
    return {
        "activations": kept,
        "working": np.where(apart, np.maximum(0.0, running - logits), running),
        "logits": logits,
        "buffers": 2.0 * inputs * np.where(alone, 1.0, 2.0)
        + software.reduced_bytes * np.minimum(software.bucket_weights, held.shared + held.routed)
        + software.workspace_bytes
        + np.where(np.asarray(mixtures) > 0, software.grouped_workspace_bytes, 0.0),
        "running": running,
    }


def _kept_per_op(work: CostInputs, held: HeldOfRank) -> Num:
    """Return what all blocks of a rank keep where every second product runs again.

    Of the products q, k, v, o, gate, up, down the first, third, fifth and seventh are kept, and
    attention's output; rows of experts are dispatched again (module
    `distributed.activation_checkpoint` of torchtitan).
    """
    model, layout = work.model, work.layout
    tp = layout.tp
    stream = model.hidden / np.where(np.asarray(layout.sequence_parallel) > 0, tp, 1.0)
    values = np.where(np.asarray(model.kv_rank) > 0, model.value_dim, model.kv_dim)
    both = stream + (2.0 * model.query_dim + values) / tp
    inner = model.ffn / tp + np.where(np.asarray(model.up) > 1.0, stream, 0.0)
    shared = model.shared_experts * model.expert_ffn / tp
    elements = held.plain * (both + inner) + held.mixtures * (both + shared)
    return work.element * work.tokens * elements


def _with_step(
    work: CostInputs, held: HeldOfRank, terms: Mapping[str, Num], running: Num
) -> dict[str, Num]:
    """Return the terms with what is there after the backward pass, where that is more.

    Gradients that are made in the backward pass of the only microbatch take the place of what its
    blocks kept, and the optimizer's buffers that of all of it.
    """
    layout, software = work.layout, work.software
    kept, whole = terms["activations"], terms["gradients"]
    passing = kept + terms["working"] + terms["logits"] + terms["gathered"] + terms["buffers"]
    once = np.asarray(software.late_gradients) * (np.asarray(layout.microbatches) <= 1.0)
    last_block = running + kept / np.maximum(1.0, held.layers)
    grown = np.maximum(0.0, whole + last_block - kept - terms["working"] - terms["logits"])
    gradients = np.where(once > 0, grown, whole)
    # The optimizer's buffers are there when those of backward are gone.
    here = np.where(np.asarray(layout.offload) > 0, 0.0, software.update_bytes)
    update = here * held.sliced(layout, 1.0) + (whole - gradients)
    return {**terms, "gradients": gradients, "update": np.maximum(0.0, update - passing)}


def deferred_weight_gradient_bytes(work: CostInputs, plain: Num, mixtures: Num) -> Num:
    """Return what waits for W on the last rank of a pipeline, of so many blocks of each kind."""
    count = microbatches_that_wait(work.layout)
    if not np.any(np.asarray(count) > 0.0):
        return 0.0
    blocks = plain * _deferred_bytes_of_block(work, mixture=False)
    if np.any(np.asarray(mixtures) > 0.0):
        blocks = blocks + mixtures * _deferred_bytes_of_block(work, mixture=True)
    return count * blocks


def _deferred_bytes_of_block(work: CostInputs, *, mixture: bool) -> Num:
    model, tp = work.model, work.layout.tp
    stream = np.where(np.asarray(work.layout.sequence_parallel) > 0, tp, 1.0)
    both = model.hidden * (1.0 + 1.0 / stream)
    plain = (2.0 * model.query_dim + 2.0 * model.kv_dim) / tp
    down = 2.0 * (model.query_rank + model.kv_rank) - model.rope_dim
    up = (model.value_dim + model.query_dim + model.kv_up_dim) / tp
    attention = both + np.where(np.asarray(model.kv_rank) > 0, down + up, plain)
    if mixture:
        rows = (model.top_k + model.shared_experts) * model.expert_ffn * (1.0 + model.up) / tp
        inner = rows + 2.0 * model.top_k * model.hidden * work.layout.expert_tp / tp
        inner = inner + np.where(np.asarray(model.shared_experts) > 0, both, 0.0)
    else:
        inner = both + model.ffn * (1.0 + model.up) / tp
    return work.element * work.tokens * (attention + inner)
