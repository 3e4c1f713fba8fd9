# SPDX-License-Identifier: Apache-2.0
"""What a block keeps for backward under any trainer, for numbers or arrays of plans.

It is the formulas of our operators (`attention.py`, `linear.py`, `experts.py`). Of other trainers
it has other numbers: rotary positions are put in place, statistics of norms are left out, and what
a trainer keeps beside is told by its facts. In bytes, with elements of 2 (Korthikanti et al., 2022,
section 4.1):

    of the residual stream  N h (8 + 2 dropout) / (t under sequence parallelism)
    of attention            N (4 query_dim + 4 kv_dim) / t, and N heads length (4 + dropout) / t
                            where no fused kernel spares the scores
    of the MLP              N ffn (2 + 2 up) / t; of experts: of each row that a token sends

What the loss has is that of our own operators, too, where it runs in backward (`units.py`); of
another trainer it is so many bytes for each logit.

Of latent attention a trainer keeps its queries, what keys and values are led up to, and the output;
what our own operators keep of it, `attention.py` says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echelon.cost.activations.attention import attention_remade_bytes, attention_saved
from echelon.cost.activations.experts import ExpertNumbers, mixture_saved
from echelon.cost.activations.linear import (
    ATTENTION_DROPOUT,
    ATTENTION_IN,
    MLP_IN,
    MLP_OUT,
    dropout_saved,
    mlp_saved,
)
from echelon.cost.activations.numbers import (
    CACHE_ELEMENTS,
    GPU_CHUNK_ELEMENTS,
    ActivationNumbers,
    total_saved_bytes,
)
from echelon.cost.activations.units import loss_backward_bytes, loss_waiting_bytes
from echelon.cost.bytes.terms import WIDE_BYTES
from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.inputs.numbers import LayoutNumbers, ModelNumbers, Num
from echelon.cost.inputs.pipeline import microbatches_that_wait

SIZE = 2
"""Bytes of a 16-bit value."""


def bytes_of_block(work: CostInputs, *, mixture: bool) -> tuple[Num, Num]:
    """Return what a block keeps of one microbatch, and what of it operators that run again drop."""
    x = _numbers(work)
    return _saved(work, x, mixture=mixture), _redone(work, x, mixture=mixture)


def saved_bytes_of_block(work: CostInputs, *, mixture: bool) -> Num:
    """Return the bytes that a block keeps of one microbatch for its backward pass."""
    return _saved(work, _numbers(work), mixture=mixture)


def _saved(work: CostInputs, x: ActivationNumbers, *, mixture: bool) -> Num:
    inner = mixture_saved(x, _expert_numbers(work)) if mixture else mlp_saved(x)
    # After attention and after the MLP.
    masks = 2.0 * dropout_saved(x, ATTENTION_DROPOUT).bytes
    more = work.model.extra_streams * x.stream + masks + _beside(work, mixture)
    return total_saved_bytes((*attention_saved(x), *inner)) + more


def _redone(work: CostInputs, x: ActivationNumbers, *, mixture: bool) -> Num:
    layout = work.layout
    attention: Num = 0.0
    if np.any(np.asarray(layout.selective) > 0.0):
        latent = np.asarray(work.model.kv_rank) > 0
        own = layout.selective * np.where(latent, 0.0, work.software.own_operators)
        attention = own * attention_remade_bytes(x)
    if mixture:
        return layout.redone_norm * x.matmul_stream + attention
    columns = x.up * x.tokens * x.inner * x.size
    inner = np.maximum(layout.redone_activation, layout.redone_mlp)
    # What layers without a gradient read, they do not keep.
    inner = x.learns(MLP_OUT) * inner * x.tokens * x.inner * x.matmul_size
    learn = x.learns(ATTENTION_IN) + x.learns(MLP_IN)
    # One norm that both branches read is not made again.
    own_norm = 1.0 * (np.asarray(work.model.block_norms) > 1.0)
    redone_norm = layout.redone_norm * own_norm * work.model.norms_before
    norms = learn * redone_norm * x.matmul_stream
    # An MLP that is made again from its input keeps that, whether a layer learns from it or not.
    alone = layout.redone_mlp * (1.0 - redone_norm) * (1 - x.learns(MLP_IN))
    alone = alone * (1.0 - (1.0 - own_norm) * x.learns(ATTENTION_IN))
    inner = inner - alone * x.matmul_stream
    return norms + inner + layout.redone_mlp * columns + attention


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBytes:
    """Hold the most that the loss has, which plans of one shard have in common."""

    whole: Num
    """Where backward is one pass."""
    split: Num
    """Of the microbatch that has logits, where backward is split."""
    waiting: Num
    """Of each other one that waits for W then."""

    def of_layout(self, layout: LayoutNumbers) -> Num:
        """Return the most that a rank with the head has of logits, and of what goes with them.

        Where backward is split, one microbatch has logits, and the others that wait for W have
        their gradients.
        """
        waiting = np.asarray(microbatches_that_wait(layout))
        if not np.any(waiting > 0.0):
            return self.whole
        split = self.split + np.maximum(0.0, waiting - 1.0) * self.waiting
        return np.where(waiting > 0.0, split, self.whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKindBytes:
    """Hold what blocks keep and the loss has, which plans of one shard have in common."""

    whole: Num
    """Bytes that a dense block keeps."""
    with_experts: Num
    """Bytes that a mixture keeps."""
    redone: Num
    """Bytes of the former that operators which run again leave out."""
    redone_of_mixture: Num
    """The same of the latter."""
    loss: LossBytes
    """Bytes that the loss has."""


def block_kind_bytes(work: CostInputs) -> BlockKindBytes:
    """Return the bytes of every kind of block; a model without experts has no mixture."""
    whole, redone = bytes_of_block(work, mixture=False)
    with_experts, redone_of_mixture = whole, redone
    if np.any(np.asarray(work.model.experts) > 0.0):
        with_experts, redone_of_mixture = bytes_of_block(work, mixture=True)
    return BlockKindBytes(
        whole=whole,
        with_experts=with_experts,
        redone=redone,
        redone_of_mixture=redone_of_mixture,
        loss=loss_kind_bytes(work),
    )


def loss_kind_bytes(work: CostInputs) -> LossBytes:
    """Return what the loss of a trainer has: where it makes logits in backward, as ours does."""
    software = work.software
    if not np.any(np.asarray(software.loss_backward) > 0.0):
        held = work.tokens * (work.model.vocab / work.layout.tp) * software.logit_held
        return LossBytes(whole=held, split=held, waiting=0.0)
    x = _loss_numbers(work)
    return LossBytes(
        whole=loss_backward_bytes(x, split=False),
        split=loss_backward_bytes(x, split=True),
        waiting=loss_waiting_bytes(x),
    )


def _loss_numbers(work: CostInputs) -> ActivationNumbers:
    """Return the sizes that the loss of our trainer has."""
    tp, element, software = work.layout.tp, np.asarray(work.element), work.software
    gpu = np.asarray(software.gpu_kernels)
    gradient_bytes = np.asarray(software.gradient_bytes)
    adds_wider = (element < WIDE_BYTES) & (gradient_bytes == WIDE_BYTES)
    stream = np.where(np.asarray(work.layout.sequence_parallel) > 0, tp, 1.0)
    return ActivationNumbers(
        tokens=work.tokens,
        rows=work.tokens / stream,
        hidden=work.model.hidden,
        heads=0,
        kv_heads=0,
        head_dim=0,
        inner=0,
        up=0,
        vocab=work.model.vocab / tp,
        size=work.element,
        statistics_bytes=np.maximum(WIDE_BYTES, element),
        matmul_size=work.element,
        tp=tp,
        low_precision=1.0 * (element < WIDE_BYTES),
        mixed=1.0 * (gradient_bytes != element),
        widens=1.0 - gpu * adds_wider,
        chunk_elements=np.where(gpu > 0.0, GPU_CHUNK_ELEMENTS, CACHE_ELEMENTS),
        # Logits of 8 bytes are for proofs, and have the way of a CPU.
        fused_loss=software.fused_loss * (element <= WIDE_BYTES),
        frozen=work.model.frozen,
    )


def _beside(work: CostInputs, mixture: bool) -> Num:
    """Return what the trainer of `work` keeps beside, by the widths of a block."""
    model, software, tp = work.model, work.software, work.layout.tp
    stream = np.where(np.asarray(work.layout.sequence_parallel) > 0, tp, 1.0)
    repeats = np.maximum(0.0, model.query_dim - model.kv_dim) / tp
    inner = model.ffn
    if mixture:
        inner = (model.top_k + model.shared_experts) * model.expert_ffn
    widths = software.saved_width * model.hidden / stream + software.saved_repeats * repeats
    alike = np.asarray(model.kv_dim) >= model.query_dim
    heads = software.saved_joint * np.where(alike, model.kv_dim, 0.0)
    several = np.asarray(work.layout.microbatch) > 1.0
    heads = heads + software.saved_turned * np.where(several, model.query_dim, 0.0)
    # Our output layer keeps 8-bit numbers beside what attention keeps.
    narrow = np.asarray(work.machine.peak_flops) > work.machine.attention_flops
    heads = heads + software.copies_in_fp8 * narrow * np.where(
        np.asarray(model.kv_rank) > 0, model.value_dim, model.query_dim
    )
    # Inputs of attention and, of an MLP that tensor ranks share, of its first product.
    inputs = work.element * model.hidden * (1.0 - 1.0 / stream) * (1.0 if mixture else 2.0)
    widths = widths + heads / tp + software.saved_whole * inputs
    return work.tokens * (widths + software.saved_inner * inner / tp)


def gpt_block_bytes(
    positions: int, hidden: int, heads: int, *, tp: int = 1, sequence_parallel: bool = False
) -> float:
    """Return the bytes that a block of GPT keeps for backward, of one sequence in 16 bits.

    s h (34 + 5 a s / h) on one device; tensor ranks share 24 + 5 a s / h of it, sequence
    parallelism the other 10 too (Korthikanti et al., 2022, equations 1, 2 and 4). The term of the
    scores, 5 a s / h, is there where attention keeps them; fused kernels do not.
    """
    x = ActivationNumbers(
        tokens=positions,
        rows=positions / tp if sequence_parallel else positions,
        hidden=hidden,
        heads=heads / tp,
        kv_heads=heads / tp,
        head_dim=hidden / heads,
        inner=4 * hidden / tp,
        up=1,
        vocab=0,
        size=SIZE,
        statistics_bytes=0,
        matmul_size=SIZE,
        low_precision=1,
        rope=0,
        dropout=1,
        scores=positions * heads / tp * positions * (2 * SIZE + 1),
    )
    masks = 2 * dropout_saved(x, ATTENTION_DROPOUT).bytes
    return float(total_saved_bytes((*attention_saved(x), *mlp_saved(x))) + masks)


def _numbers(work: CostInputs) -> ActivationNumbers:
    """Return the sizes of a block under the trainer of `work`."""
    model, layout, software = work.model, work.layout, work.software
    tp, tokens = layout.tp, work.tokens
    stream = np.where(np.asarray(layout.sequence_parallel) > 0, tp, 1.0)
    # Products in fp8 keep their inputs in fp8.
    narrow = np.asarray(work.machine.peak_flops) > work.machine.attention_flops
    plain = (1.0 - software.fused_attention) * (1.0 - layout.selective)
    scores = plain * tokens * (model.heads * model.length / tp)
    # The widths of keys and values together, as if both were heads of the width of a query.
    latent = np.asarray(model.kv_rank) > 0
    keys = np.where(latent, model.kv_up_dim, 2.0 * model.kv_dim)
    # What latent attention keeps is told by widths alone.
    own = np.where(latent, 0.0, software.own_operators)
    ulysses = layout.ulysses
    return ActivationNumbers(
        tokens=tokens,
        rows=tokens / stream,
        hidden=model.hidden,
        heads=model.query_dim / tp,
        kv_heads=keys / (2.0 * tp),
        head_dim=1.0,
        inner=model.ffn / tp,
        up=model.up,
        vocab=0.0,
        size=work.element,
        statistics_bytes=0.0,
        matmul_size=np.where(narrow, 1.0, work.element),
        low_precision=1,
        rope=own * (np.asarray(model.positions) == 0),
        qk_norm=np.where(
            np.asarray(model.head_norms + model.width_norms) > 0, software.saved_normed + own, 0.0
        ),
        ring=own * (np.asarray(layout.cp / ulysses) > 1),
        transposed=own * software.gpu_kernels * _by_head(work),
        exchanged=own * (np.asarray(ulysses) > 1),
        copies=np.maximum(1.0, ulysses * tp * model.query_dim / (model.kv_dim * model.heads)),
        dropout=software.dropout,
        frozen=model.frozen,
        adapters=_adapters(model),
        scores=scores * (2.0 * work.element + software.dropout),
    )


def _adapters(model: ModelNumbers) -> tuple[Num, Num, Num, Num]:
    """Return the rows of the A of all adapters of each of `LINEAR_GROUPS`.

    Those before the heads of latent attention are told together, as those of q, k and v.
    """
    return (
        model.adapters_attention_in,
        model.adapters_attention_out,
        model.adapters_mlp_in,
        model.adapters_mlp_out,
    )


def _by_head(work: CostInputs) -> Num:
    """Return 1 where no flash attention runs, and what does gives its output head by head.

    `output_is_by_head` in `cost/bytes/context_memory.py` says so of one plan.
    """
    layout, element = work.layout, np.asarray(work.element)
    several = np.asarray(layout.microbatch) > 1
    found = (element > WIDE_BYTES) | ((element == WIDE_BYTES) & several)
    pieces = np.asarray(layout.gathered) * (np.asarray(layout.cp / layout.ulysses) > 1)
    return found * (1.0 - pieces)


def _expert_numbers(work: CostInputs) -> ExpertNumbers:
    """Return the sizes of a mixture whose load is balanced; pieces of experts need every row."""
    model, layout = work.model, work.layout
    return ExpertNumbers(
        routed=0.0,
        experts=model.experts,
        top_k=model.top_k,
        here=work.tokens * model.top_k * layout.expert_tp / layout.tp,
        inner=model.expert_ffn / layout.expert_tp,
        shared_inner=model.shared_experts * model.expert_ffn / layout.tp,
        places=0.0,
        up=model.up,
        unfused=1,
    )
