"""Bytes that a module of one's own sends: data, tensor and context ranks, experts, stages.

Data parallelism and ZeRO alone are `module_bytes`; a pipeline adds its messages to them.

Over tensor ranks (`module_tensor_bytes`), all times s, the bytes of an element: N tokens of a
microbatch, n tensor ranks, I inputs, O outputs, D the width of the stream, l bytes of what losses
are computed in.

    whole stream        forward                       backward
    entry of columns    -                             all-reduce of N I
    row                 all-reduce of N O             -
    column-gathered     all-gather of N O/n           -
    row-scattered       all-reduce of N O             all-gather of N I/n
    embedding           all-reduce of N O             -
    head                all-gather of N O/n           all-reduce of N I
    head, split loss    all-gather of 3 N l           all-reduce of N I

    in the blocks, where the stream is cut along the sequence
    entry of columns    all-gather of N/n I           reduce-scatter of N/n I
    row                 reduce-scatter of N/n O       all-gather of N/n O
    the first block     -                             all-gather of N/n D
    after the last      all-gather of N/n D           -

Source: Shoeybi et al., "Megatron-LM", 2019, section 3; Korthikanti et al., 2022, section 4.2.2.

Stacks of experts, for each call (`module_expert_bytes`): N tokens of the call on all ranks, D their
width, K experts of a token, E experts, g bytes of a gate. Of the rows (a token and one of its
experts) S leave this rank for experts elsewhere and R come from other ranks.

    whole stream         forward                       backward
    what experts make    all-reduce of N D s           -
    tokens and gates     -                             all-reduces of N D s and N K g

    along the sequence
    counts               all-to-all of 8 E             -
    rows and gates       S (D s + g)                   R (D s + g)
    what experts make    R D s                         S D s

Source: Lepikhin et al., "GShard", 2020, section 2.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from echelon.core.attention_mask import AttentionMask
from echelon.core.axis import Axis
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.all_reduce import sums_sent
from echelon.cost.bytes.context_sent import block_bytes
from echelon.cost.bytes.data import DATA_AXIS, mirrored_bytes, tied_bytes
from echelon.cost.bytes.terms import (
    INDEX_BYTES,
    all_gather_bytes,
    all_reduce_bytes,
    all_to_all_bytes,
    reduce_scatter_bytes,
)
from echelon.layout.buckets import BucketPlan, accumulates_slices, shard_degree, slice_elements
from echelon.layout.data_groups import gradient_ranks
from echelon.layout.modules import (
    CUT_INPUTS,
    CUT_OUTPUTS,
    ModuleBuckets,
    ModuleSplit,
    SplitLayer,
    StackedExperts,
)
from echelon.layout.stage import part_of
from echelon.schedule.from_plan import messages_from_plan


def module_bytes(
    plan: Plan, buckets: ModuleBuckets, *, rank: int = 0, passes: int, kept: Collection[str]
) -> dict[str, int]:
    """Return the bytes that `rank` sends for data parallelism in a step of `passes` backwards.

    A sliced bucket in `kept` is whole from forward to the end of backward, so it is gathered once
    for both; without resharding each is gathered once per step.
    """
    zero, trained = plan.layout.zero, buckets.trained
    wide = DTYPE_BYTES[plan.mathematics.precision.reduction]
    if zero.stage == 0:
        elements = (bucket.num_elements for bucket in trained)
        group = gradient_ranks(plan, rank, expert=False)
        sent = {DATA_AXIS: sums_sent(plan, group, rank, elements, wide)[0]}
    else:
        size = DTYPE_BYTES[plan.mathematics.precision.parameters]
        degree = shard_degree(plan)

        def gathers(bucket: BucketPlan) -> int:
            if not (bucket.sliced and zero.reshard_after_forward):
                return 1
            return passes * (1 if bucket.name in kept else 2)

        rounds = passes if accumulates_slices(plan) else 1
        scattered = (reduce_scatter_bytes(slice_elements(plan, b) * wide, degree) for b in trained)
        gathered = (
            gathers(b) * all_gather_bytes(slice_elements(plan, b) * size, degree)
            for b in (*trained, *buckets.frozen)
        )
        group = plan.mesh.group(rank, Axis.DP_REPLICATE)
        slices = (slice_elements(plan, bucket) for bucket in trained)
        sent = {
            Axis.DP_SHARD.value: rounds * sum(scattered) + sum(gathered),
            Axis.DP_REPLICATE.value: sums_sent(plan, group, rank, slices, wide)[0],
        }
    sent[Axis.TP.value] = sum(
        all_reduce_bytes(slice_elements(plan, one) * wide, plan.mesh.tp)
        for one in trained
        if one.kind == "partial"
    )
    return {axis: count for axis, count in sent.items() if count}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """Say which modules a pipeline stage runs; None are all."""

    modules: tuple[str, ...] | None = None
    first: bool = True
    last: bool = True

    def holds(self, name: str) -> bool:
        """Return whether a layer is in one of the modules."""
        within = (name == one or name.startswith(f"{one}.") for one in self.modules or ())
        return self.modules is None or any(within)


WHOLE = StageLayers()
"""A module that is not cut into stages."""


def module_tensor_bytes(
    split: ModuleSplit,
    tokens: int,
    element_bytes: int,
    *,
    backward: bool = True,
    stage: StageLayers = WHOLE,
    loss_bytes: int | None = None,
) -> int:
    """Return the bytes that a rank sends in a forward and, unless told, its backward.

    `tokens` are the positions of all sequences of the microbatch, of which tensor ranks see the
    same. Gradients of `split.summed` come once a step, and are those of `module_bytes`.
    A pipeline stage sends what its own layers do. `loss_bytes` are those of a number that a loss is
    computed in, where it takes the columns of each rank; otherwise logits are gathered.
    """
    if split.degree == 1:
        return 0
    ahead, back, entries = 0, 0, set[str]()
    for one in split.layers:
        if not stage.holds(one.name):
            continue
        cut = split.sequence is not None and split.sequence.holds(one.name)
        forward, behind = _layer(one, split.degree, tokens * element_bytes, cut=cut)
        if loss_bytes is not None and _is_head(one):
            forward = all_gather_bytes(3 * tokens * loss_bytes, split.degree)
        ahead, back = ahead + forward, back + behind
        if (one.kind in CUT_OUTPUTS or _is_head(one)) and one.entry not in entries:
            entries.add(one.entry)
            size = tokens * element_bytes * one.inputs
            if cut:
                ahead += all_gather_bytes(size // split.degree, split.degree)
                back += reduce_scatter_bytes(size // split.degree, split.degree)
            else:
                back += all_reduce_bytes(size, split.degree)
    if split.sequence is not None:
        size = tokens * element_bytes * split.sequence.width // split.degree
        ahead += all_gather_bytes(size, split.degree) * stage.last
        back += all_gather_bytes(size, split.degree) * stage.first
    return ahead + (back if backward else 0)


def _layer(one: SplitLayer, degree: int, column_bytes: int, *, cut: bool) -> tuple[int, int]:
    """Return what a layer sends of its outputs forward, and of what it is given backward.

    `column_bytes` are those of one column of all tokens.
    """
    inputs, outputs = column_bytes * one.inputs, column_bytes * one.outputs
    if one.kind == "column-gathered" or _is_head(one):
        return all_gather_bytes(outputs // degree, degree), 0
    if one.kind in CUT_INPUTS:
        back = all_gather_bytes(inputs // degree, degree) if one.kind == "row-scattered" else 0
        if not cut:
            return all_reduce_bytes(outputs, degree), back
        piece = outputs // degree
        return (
            reduce_scatter_bytes(piece, degree),
            back + all_gather_bytes(piece, degree),
        )
    if one.kind == "vocabulary":
        return all_reduce_bytes(outputs, degree), 0
    return 0, 0


def _is_head(one: SplitLayer) -> bool:
    return one.kind == "vocabulary" and one.layer == "linear"


class CallSizes(Protocol):
    """What a call of attention is: heads, their width, and its mask."""

    @property
    def heads(self) -> int:
        """Return the query heads."""
        ...

    @property
    def kv_heads(self) -> int:
        """Return the key/value heads."""
        ...

    @property
    def head_dim(self) -> int:
        """Return the width of a head."""
        ...

    @property
    def mask(self) -> AttentionMask:
        """Return which keys a query meets."""
        ...


def module_context_bytes(plan: Plan, calls: Iterable[CallSizes], *, rank: int) -> int:
    """Return the bytes that `rank` sends over `cp` in a step of one backward per microbatch."""
    cp_rank = plan.mesh.coordinates(rank)[Axis.CP]
    return plan.num_microbatches * sum(
        sum(block_bytes(_with_attention(plan, one), cp_rank)) for one in calls
    )


def _with_attention(plan: Plan, call: CallSizes) -> Plan:
    """Return the plan of a model whose blocks have this attention."""
    model = replace(
        plan.model,
        heads=call.heads,
        kv_heads=call.kv_heads,
        head_dim=call.head_dim,
        causal=call.mask.causal,
        window=call.mask.window,
    )
    return replace(plan, mathematics=replace(plan.mathematics, model=model))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCall:
    """Say what a module with experts was called with: sizes, and rows that leave and arrive."""

    tokens: int
    width: int
    choices: int
    leaving: int = 0
    arriving: int = 0


def module_expert_bytes(
    experts: StackedExperts,
    call: ExpertCall,
    *,
    degree: int,
    element_bytes: int,
    gate_bytes: int,
    backward: bool = True,
) -> int:
    """Return the bytes that a rank sends in one call and, unless told, its backward."""
    if degree == 1:
        return 0
    row = call.width * element_bytes
    if not experts.cut:
        tokens = all_reduce_bytes(call.tokens * row, degree)
        gates = all_reduce_bytes(call.tokens * call.choices * gate_bytes, degree)
        return tokens + (tokens + gates if backward else 0)
    counts = all_to_all_bytes(INDEX_BYTES * experts.num_experts, degree)
    ahead = counts + call.leaving * (row + gate_bytes) + call.arriving * row
    back = call.arriving * (row + gate_bytes) + call.leaving * row
    return ahead + (back if backward else 0)


def module_pipeline_bytes(
    plan: Plan, buckets: ModuleBuckets, *, rank: int, stream_elements: int
) -> dict[str, int]:
    """Return the bytes that `rank` sends in a step, by axis; those of `world` are not among them.

    `stream_elements` are those of the tensor that travels, per microbatch. At ZeRO stage 3 the
    parameters of a stage are gathered for the forward and for the backward of each microbatch.
    """
    part = part_of(plan, rank)
    passes = {one.stage: one.microbatches for one in part.stages}
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    activations, gradients = map(Counter.total, messages_from_plan(plan, part.pp_rank))
    sent = Counter(module_bytes(plan, _as_whole(buckets), rank=rank, passes=1, kept=()))
    degree, zero = shard_degree(plan), plan.layout.zero
    if zero.stage:
        wide = DTYPE_BYTES[plan.mathematics.precision.reduction]
        for bucket in (*buckets.trained, *buckets.frozen):
            crossings = sum(passes[stage] for stage in bucket.stages)
            piece = slice_elements(plan, bucket)
            if bucket.sliced:
                gathers = 2 * crossings if zero.reshard_after_forward else 1
                sent[Axis.DP_SHARD.value] += (gathers - 1) * all_gather_bytes(piece * size, degree)
        for bucket in buckets.trained if accumulates_slices(plan) else ():
            # After each backward of each of its stages; the first one is counted above.
            crossings = sum(passes[stage] for stage in bucket.stages)
            piece = reduce_scatter_bytes(slice_elements(plan, bucket) * wide, degree)
            sent[Axis.DP_SHARD.value] += (crossings - 1) * piece
    tied = tied_bytes(plan, buckets.trained, rank)
    mirrored = mirrored_bytes(plan, part, buckets.trained, rank)
    sent[Axis.PP.value] += (activations + gradients) * stream_elements * size
    sent[Axis.PP.value] += tied.bytes + mirrored.bytes
    return {axis: count for axis, count in sent.items() if count}


def _as_whole(buckets: ModuleBuckets) -> ModuleBuckets:
    """Return buckets of which each is gathered once."""
    return ModuleBuckets(
        trained=tuple(replace(one, sliced=False) for one in buckets.trained),
        frozen=tuple(replace(one, sliced=False) for one in buckets.frozen),
    )
