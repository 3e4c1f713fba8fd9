# SPDX-License-Identifier: Apache-2.0
"""Seconds of a block and of the ends of a model for one microbatch on one rank: F, B and W.

Every product has its shard's shape: of N tokens on a context rank and tensor degree t, a
column-cut weight [h, n] is [N, h] x [h, n / t], a row-cut one [N, n / t] x [n / t, h]. The gradient
of the input is [N, n / t] x [n / t, h], that of the weight [h, N] x [N, n / t]. Attention without a
fused kernel is two batched products of depth head_dim and scores that go through memory; a fused
one is 4 N reach A FLOPs forward, 10 backward (Dao, FlashAttention-2, 2023). A pass takes no less
than its kernels take to start.

The head is a product of [N, h] by [h, V / t], and twice that backward; logits are read and written
for a maximum, a sum of exponentials and their gradient. Our trainer does all of it in backward.

What a block sends, and what of that shows, is told in `exchanges.py`.

Seconds that a plan waits for positions and for experts (`context_seconds`, `dispatch_seconds`) are
the exchanges of a block taken apart: the computing meanwhile, how long rows are on their way, and
how much of that no work hides. `echelon explain context` and `echelon explain experts` compare by
these numbers the ways that a run could take.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, fields, replace

import numpy as np

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.bytes.piece_traffic import HEAD_WIDTHS
from echelon.cost.inputs.cost_inputs import CostInputs, library_group_links
from echelon.cost.inputs.numbers import LayoutNumbers, ModelNumbers, Num, first_number
from echelon.cost.seconds.collectives import all_reduce_seconds, sum_seconds
from echelon.cost.seconds.exchanges import (
    NOTHING,
    ExchangeSeconds,
    LayerPair,
    chunk_kernels,
    context_exchange,
    expert_exchange,
    tensor_seconds,
)
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.cost.seconds.kernels import (
    alignment_efficiency,
    attention_rates,
    matmul_seconds,
    memory_seconds,
)

BACKWARD_KERNELS = 1.5  # times those of forward
BACKWARD_MEMORY_PASSES = 1.5  # times those of forward
COUNTS_READ = 0.5
"""The share of a mixture's wait that is no expert's own."""
EXPERTS_HERE = 8.0
"""Experts of a rank for which the other part of that wait is given."""
RING_KERNELS = 8.0
"""Kernels of each further step of a ring: attention, its sum with those before, messages."""
MERGED_BYTES = 10.0
"""Bytes of traffic to add the output of a step of a ring in fp32, for each of its numbers."""
KERNEL_START_S = 4e-6
"""What a host takes to start a kernel where it is no graph of many that is started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSeconds:
    """Give the seconds of a pass through a block, by what they go to."""

    matmul: Num
    attention: Num
    memory_bound: Num
    host: Num
    tensor: Num
    context: Num
    expert: Num
    room: Num
    """Seconds for which the device is at work beyond those in which its host starts the kernels."""

    def at_pace(self, pace: Num) -> PassSeconds:
        """Return a pass that takes `pace` times as long."""
        return PassSeconds(**{item.name: pace * getattr(self, item.name) for item in fields(self)})

    @property
    def total(self) -> Num:
        """Return the sum."""
        return self.compute + self.tensor + self.context + self.expert

    @property
    def compute(self) -> Num:
        """Return the seconds in which the device computes, or waits for its host."""
        return self.matmul + self.attention + self.memory_bound + self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSeconds:
    """Give the seconds of operators that may run once more; that of the MLP has its activation."""

    norm: Num
    activation: Num
    mlp: Num
    attention: Num

    def of_layout(self, layout: LayoutNumbers) -> Num:
        """Return the seconds of those that run again under a layout."""
        activation = np.maximum(0.0, layout.redone_activation - layout.redone_mlp)
        inner = activation * self.activation + layout.redone_mlp * self.mlp
        return layout.selective * self.attention + layout.redone_norm * self.norm + inner

    def of_operators(self, names: Set[str]) -> float:
        """Return the seconds of some of them."""
        told = names - {"activation"} if "mlp" in names else names
        return sum(first_number(getattr(self, name)) for name in told)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeconds:
    """Give the passes of a block: forward, gradients of inputs, gradients of weights."""

    forward: PassSeconds
    input_gradients: PassSeconds
    weight_gradients: Num
    again: OperatorSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSeconds:
    """Give the seconds of the embedding, and of the head: forward, and of each gradient."""

    embedding: Num
    head_forward: Num
    head_input_gradient: Num
    head_weight_gradient: Num

    @property
    def head_backward(self) -> Num:
        """Return the seconds of both gradients of the head."""
        return self.head_input_gradient + self.head_weight_gradient


def block_seconds(work: CostInputs, *, mixture: bool) -> BlockSeconds:
    """Return the seconds of a dense block, or of one with experts."""
    forward, inputs, weights = _attention_matmuls(work)
    routed = routed_matmuls(work) if mixture else (0.0, 0.0, 0.0)
    inner = _sum(routed, _matmuls_of_all_tokens(work, mixture=mixture))
    forward, inputs, weights = (
        a + b for a, b in zip((forward, inputs, weights), inner, strict=True)
    )
    # What adapters add is too narrow to count.
    weights = (1.0 - work.model.frozen) * weights
    attention, attention_back = attention_seconds(work)
    moves = _memory_bound_seconds(work, mixture=mixture)
    software = work.software
    hidden = software.tensor_overlap * (weights + 0.0)
    tensor, tensor_back = tensor_seconds(work, hidden, _layer_pairs(work, mixture=mixture))
    context = context_exchange(work, attention, attention_back)
    expert = expert_exchange(work, routed) if mixture else NOTHING
    rings = np.where(
        np.asarray(work.layout.gathered) > 0, 1.0, work.layout.cp / work.layout.ulysses
    )
    started = software.kernels + RING_KERNELS * (rings - 1.0) + chunk_kernels(work)
    start = started * software.host_s
    reading = _host_of_experts(work) if mixture else 0.0
    device = forward + attention + moves
    first = PassSeconds(
        matmul=forward,
        attention=attention,
        memory_bound=moves,
        host=np.maximum(software.host_adds * start, start - device) + reading,
        tensor=tensor,
        context=context.shown_forward,
        expert=expert.shown_forward,
        room=np.maximum(0.0, device - start),
    )
    back = _memory_bound_seconds(work, mixture=mixture, backward=True)
    device = inputs + weights + attention_back + back
    later = BACKWARD_KERNELS * start
    second = PassSeconds(
        matmul=inputs,
        attention=attention_back,
        memory_bound=back,
        host=np.maximum(software.host_adds * later, later - device) + reading,
        tensor=tensor_back,
        context=context.shown_backward,
        expert=expert.shown_backward,
        room=np.maximum(0.0, device - later),
    )
    return BlockSeconds(
        forward=first.at_pace(software.pace),
        input_gradients=second.at_pace(software.pace),
        weight_gradients=software.pace * weights,
        again=_operator_seconds(
            work, software.pace * (attention + context.shown_forward), tensor, mixture=mixture
        ),
    )


def _operator_seconds(
    work: CostInputs, attention: Num, tensor: Num, *, mixture: bool
) -> OperatorSeconds:
    """Return the seconds of operators of a block by themselves; of a mixture only some can be.

    An MLP gathers its input again where the stream is split: one of four motions of a forward pass.
    """
    model, layout, pace = work.model, work.layout, work.software.pace
    split = np.asarray(layout.sequence_parallel) > 0
    stream = work.element * work.tokens * model.hidden / np.where(split, layout.tp, 1.0)
    norm = memory_seconds(work.machine, (2.0 if mixture else 4.0) * stream)
    if mixture:
        return OperatorSeconds(norm=pace * norm, activation=0.0, mlp=0.0, attention=attention)
    inner = work.tokens * model.ffn / layout.tp
    activation = memory_seconds(work.machine, work.element * (1.0 + model.up) * inner)
    product = _linear(work, work.tokens, model.hidden, model.up * model.ffn / layout.tp)[0]
    return OperatorSeconds(
        norm=pace * norm,
        activation=pace * activation,
        mlp=pace * (activation + product + np.where(split, tensor / 4.0, 0.0)),
        attention=attention,
    )


def _linear(work: CostInputs, rows: Num, depth: Num, columns: Num) -> tuple[Num, Num, Num]:
    machine, element = work.machine, work.element
    fast, slow = machine.peak_flops, machine.attention_flops
    late, back = (
        replace(machine, peak_flops=wide * slow + (1.0 - wide) * fast)
        for wide in (work.software.wide_weight_gradients, work.software.wide_input_gradients)
    )
    used = np.asarray(depth * columns) > 0
    return (
        np.where(used, matmul_seconds(machine, rows, depth, columns, element), 0.0),
        np.where(used, matmul_seconds(back, rows, columns, depth, element), 0.0),
        np.where(used, matmul_seconds(late, depth, rows, columns, element), 0.0),
    )


def _sum(*parts: tuple[Num, Num, Num]) -> tuple[Num, Num, Num]:
    forward, inputs, weights = parts[0]
    for part in parts[1:]:
        forward, inputs, weights = forward + part[0], inputs + part[1], weights + part[2]
    return forward, inputs, weights


def _host_of_experts(work: CostInputs) -> Num:
    """Return how long a pass waits for the host: for the counts of rows, and for each expert."""
    here = np.maximum(work.model.experts, 1.0) / work.layout.ep
    part = COUNTS_READ + (1.0 - COUNTS_READ) * here / EXPERTS_HERE
    quick = np.minimum(1.0, np.asarray(work.machine.launch_s) / KERNEL_START_S)
    return quick * work.software.mixture_s * part


def _attention_widths(work: CostInputs) -> LayerPair:
    """Return the columns of attention that read the stream, and those that go back into it."""
    model = work.model
    latent = np.asarray(model.kv_rank) > 0
    # Some latent models lead only keys and values down: queries come of the stream.
    direct = np.where(np.asarray(model.query_rank) > 0, 0.0, model.query_dim)
    plain = np.where(latent, direct, model.query_dim + 2.0 * model.kv_dim)
    return plain, np.where(latent, model.value_dim, model.query_dim)


def _layer_pairs(work: CostInputs, *, mixture: bool) -> tuple[LayerPair | None, ...]:
    """Return the columns of a rank in each branch of a block; None of routed experts alone."""
    model, tp = work.model, work.layout.tp
    plain, width = _attention_widths(work)
    ffn = model.shared_experts * model.expert_ffn if mixture else model.ffn
    inner = (model.up * ffn / tp, ffn / tp) if np.all(np.asarray(ffn) > 0) else None
    return (plain / tp, width / tp), inner


def _attention_matmuls(work: CostInputs) -> tuple[Num, Num, Num]:
    model, tp, tokens = work.model, work.layout.tp, work.tokens
    latent = np.asarray(model.kv_rank) > 0
    plain, width = _attention_widths(work)
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


def _dense_matmuls(work: CostInputs, ffn: Num) -> tuple[Num, Num, Num]:
    model, tp = work.model, work.layout.tp
    return _sum(
        _linear(work, work.tokens, model.hidden, model.up * ffn / tp),
        _linear(work, work.tokens, ffn / tp, model.hidden),
    )


def _matmuls_of_all_tokens(work: CostInputs, *, mixture: bool) -> tuple[Num, Num, Num]:
    """Return the seconds of the products that every token meets: an MLP; or router and experts."""
    model, layout = work.model, work.layout
    if not mixture:
        return _dense_matmuls(work, model.ffn)
    ranks = layout.tp / layout.expert_tp
    router = _linear(work, work.tokens / ranks, model.hidden, np.maximum(model.experts, 1.0))
    shared = _dense_matmuls(work, model.shared_experts * model.expert_ffn)
    return _sum(router, shared)


def routed_matmuls(work: CostInputs) -> tuple[Num, Num, Num]:
    """Return the seconds of the experts of a rank: each has its rows, one after the other."""
    model, layout = work.model, work.layout
    experts = np.maximum(model.experts, 1.0)
    here = experts / layout.ep
    ranks = layout.tp / layout.expert_tp
    rows = layout.padding * work.tokens * model.top_k / ranks * layout.ep / experts
    width = model.expert_ffn / layout.expert_tp
    routed = _sum(
        _linear(work, rows, model.hidden, model.up * width),
        _linear(work, rows, width, model.hidden),
    )
    return here * routed[0], here * routed[1], here * routed[2]


def attention_seconds(work: CostInputs) -> tuple[Num, Num]:
    """Return the seconds of attention itself, forward and backward."""
    model, machine, software = work.model, work.machine, work.software
    ranks = work.layout.tp * work.layout.cp
    queries = work.layout.microbatch * model.length / ranks
    flops = 4.0 * queries * model.keys_per_query * model.attention_dim
    # A ring meets the keys piece by piece, each in a call of its own.
    ring = work.layout.cp / work.layout.ulysses
    calls = np.where(np.asarray(work.layout.gathered) > 0, 1.0, ring)
    fast, fast_back = attention_rates(machine, software.fused_share, model.keys_per_query / calls)
    more = (calls - 1.0) * MERGED_BYTES * work.tokens / work.layout.tp
    fused = flops / fast + memory_seconds(machine, more * model.query_dim)
    fused_back = 2.5 * flops / fast_back
    fused_back = fused_back + memory_seconds(
        machine, more * (model.query_dim + 2.0 * np.maximum(model.kv_dim, model.kv_up_dim / 2.0))
    )
    # Without a fused kernel the mask hides nothing of the products.
    scores = queries * model.length * model.heads
    aligned = alignment_efficiency(machine, model.attention_dim / model.heads)
    whole = 4.0 * queries * model.length * model.attention_dim
    rate = machine.attention_flops * machine.attention * aligned**2
    plain = whole / rate + memory_seconds(machine, software.score_bytes * scores)
    plain_back = 2.0 * whole / rate
    plain_back = plain_back + memory_seconds(
        machine, BACKWARD_MEMORY_PASSES * software.score_bytes * scores
    )
    one = software.fused_attention
    return one * fused + (1.0 - one) * plain, one * fused_back + (1.0 - one) * plain_back


def _memory_bound_seconds(work: CostInputs, *, mixture: bool, backward: bool = False) -> Num:
    """Return the seconds of norms, activations, residuals and the like, forward or backward."""
    model, layout, software = work.model, work.layout, work.software
    shared_out = np.where(np.asarray(layout.sequence_parallel) > 0, layout.tp, 1.0)
    ffn: Num = model.ffn / layout.tp
    if mixture:
        # Rows are copied to be sent, on arrival, and back: four times both ways.
        ffn = (model.top_k + model.shared_experts) * model.expert_ffn / layout.tp
        copied = 8.0 * model.top_k * model.hidden / layout.tp
    else:
        copied = 0.0
    passes = BACKWARD_MEMORY_PASSES if backward else 1.0
    widths, inner = software.width_bytes, software.inner_bytes * 0.5 * (1.0 + model.up)
    if backward:
        widths, inner = widths * software.width_passes, inner * software.inner_passes
    turned = software.head_bytes * (software.head_passes if backward else 1.0) * _turned(model)
    turned = turned / layout.tp
    bytes_each = widths * model.hidden / shared_out + turned + passes * copied + inner * ffn
    # Products in fp8 read what was cast before.
    narrow = np.asarray(work.machine.peak_flops) > work.machine.attention_flops
    low_precision = np.where(narrow, software.fp8_bytes, 0.0)
    bytes_each = bytes_each + passes * low_precision * (3.0 * model.hidden / shared_out + ffn)
    # The bytes of a trainer are those of 2-byte elements.
    return memory_seconds(work.machine, 0.5 * work.element * bytes_each * work.tokens)


def _turned(model: ModelNumbers) -> Num:
    """Return the width of queries and keys that are turned, with the values that go with them.

    Latent attention turns few of its numbers; a learned table of positions, none.
    """
    plain = model.query_dim + 2.0 * model.kv_dim
    width = np.where(np.asarray(model.kv_rank) > 0, HEAD_WIDTHS * model.hidden, plain)
    return np.where(np.asarray(model.positions) > 0, 0.0, width)


def end_seconds(work: CostInputs) -> EndSeconds:
    """Return the seconds of embedding and head for one microbatch on one rank."""
    model, layout, software = work.model, work.layout, work.software
    # Where products are done in fp8, those of the head are not.
    machine = replace(work.machine, peak_flops=work.machine.attention_flops)
    tokens, columns = work.tokens, model.vocab / layout.tp
    forward = matmul_seconds(machine, tokens, model.hidden, columns, work.element)
    inputs = matmul_seconds(machine, tokens, columns, model.hidden, work.element)
    weights = matmul_seconds(machine, model.hidden, tokens, columns, work.element)
    logits = memory_seconds(machine, 0.5 * software.logit_bytes * tokens * columns)
    rows = work.element * tokens * model.hidden
    way = library_group_links(work, layout.tp, 1.0)
    joined = sum_seconds(way, rows, layout.sums)
    small = 3.0 * all_reduce_seconds(way, 4.0 * tokens)
    pace, late = software.pace, software.loss_backward
    return EndSeconds(
        embedding=pace * (memory_seconds(machine, 7.0 * rows) + joined),
        head_forward=pace * (1.0 - late) * (forward + logits + small),
        head_input_gradient=pace * (late * (forward + logits + small) + inputs + logits + joined),
        head_weight_gradient=pace * (1.0 - model.frozen) * weights,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposedSeconds:
    """Give the seconds of transfers (hidden or not), of those that show, and of computing."""

    transfer_s: float
    exposed_s: float
    compute_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return the seconds of computing with what is waited for."""
        return self.compute_s + self.exposed_s


def context_seconds(plan: Plan) -> ExposedSeconds | None:
    """Return the seconds of attention over context ranks; None where a link is not known."""
    if not _has_link(plan, plan.mesh.groups(Axis.CP)[0]):
        return None
    work = cost_inputs_from_plan(plan)
    forward, backward = attention_seconds(work)
    moved = context_exchange(work, forward, backward)
    return _exposed(moved, first_number(forward + backward))


def dispatch_seconds(plan: Plan) -> ExposedSeconds | None:
    """Return the seconds of a block's rows; None where none travel, or a link is not known."""
    if plan.model.experts is None or plan.mesh.ep == 1:
        return None
    if not _has_link(plan, plan.mesh.expert_groups(expert_tp=plan.layout.experts.expert_tp)[0]):
        return None
    work = cost_inputs_from_plan(plan)
    return _exposed(expert_exchange(work, routed_matmuls(work)))


def _exposed(moved: ExchangeSeconds, compute_s: float = 0.0) -> ExposedSeconds:
    return ExposedSeconds(
        transfer_s=first_number(moved.forward + moved.backward),
        exposed_s=first_number(moved.shown_forward + moved.shown_backward),
        compute_s=compute_s,
    )


def _has_link(plan: Plan, ranks: tuple[int, ...]) -> bool:
    """Return whether a link of the cluster joins these ranks."""
    links = plan.cluster.links
    return len(ranks) < 2 or any(len({r // link.degree for r in ranks}) == 1 for link in links)
