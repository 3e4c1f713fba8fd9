"""Bytes that data parallelism and ZeRO send in one optimizer step, bucket by bucket.

`G` is the elements of all buckets (padding included), `n` the degree of the axis, `s` the bytes of
an element as it is sent: gradients in the dtype `reduction`, parameters in `parameters`, Muon's
pieces in `master`. `M` is the microbatches per step, a slice the part of a bucket that a rank
updates: G over the degree of `dp_shard x cp`, all of it at stage 0.

A bucket is reduced over data ranks first; what other axes still have to add up (norms under
sequence parallelism, a tied embedding, replicas) is added to the slice only, once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from echelon.core.axis import LOSS_AXES, Axis
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.buckets import (
    BucketPlan,
    accumulates_slices,
    data_degree,
    shard_degree,
    slice_elements,
    zero_stage,
)
from echelon.cost.collectives import all_gather_bytes, all_reduce_bytes, reduce_scatter_bytes
from echelon.cost.muon import MuonExchange, muon_elements
from echelon.cost.stage import RankPart
from echelon.cost.terms import SentTerm

COUNT_BYTES = 8
"""The token count that data ranks exchange: one int64."""

DATA_AXIS = "dp"
"""All data ranks: `dp_replicate` x `dp_shard` x `cp`."""

EXPERT_DATA_AXIS = "edp"
"""All ranks of a stage that hold the same experts."""

EXPERT_SHARD_AXIS = "edp_shard"
"""Those of one replica, over which ZeRO cuts experts."""

STAGE_AXIS = "stage"
"""All ranks of one pipeline stage: data ranks x tensor ranks."""

_ZERO = "Rajbhandari et al., ZeRO, 2020, section 7"

Buckets = Sequence[BucketPlan]


def data_bytes(plan: Plan, part: RankPart, buckets: Buckets) -> tuple[SentTerm, ...]:
    """Return the terms of the axes "dp", "dp_shard" and "dp_replicate", and those of experts."""
    count = SentTerm(
        axis=DATA_AXIS,
        name="token count",
        count=1,
        each=all_gather_bytes(COUNT_BYTES, plan.mesh.degree(*LOSS_AXES)),
        formula="(n-1) x 8",
        source="the loss has one denominator, known before backward",
    )
    terms: list[SentTerm] = []
    for expert in (False, True):
        alike = [bucket for bucket in buckets if bucket.expert is expert]
        if zero_stage(plan, expert=expert) == 0:
            terms.append(_all_reduced(plan, alike, expert))
        else:
            terms += _scattered(plan, part, alike, expert)
            terms += _gathered(plan, part, alike, expert)
            terms.append(_replicas(plan, alike))
    return (*terms, count)


def partial_bytes(plan: Plan, buckets: Buckets) -> SentTerm:
    """Return what tensor ranks send to add up gradients of which each sees a part."""
    return SentTerm(
        axis=Axis.TP.value,
        name="replicated parameters",
        count=1,
        each=_hop(plan, _of_kind(buckets, "partial"), plan.mesh.tp),
        formula="2 (n-1)/n x slices of norms and output biases x s",
        source="Korthikanti et al., 2022, section 4.2.2",
    )


def tied_bytes(plan: Plan, buckets: Buckets) -> SentTerm:
    """Return what the two ends of a pipeline send to add up the gradient of a tied embedding."""
    return SentTerm(
        axis=Axis.PP.value,
        name="tied embedding",
        count=1,
        each=_hop(plan, _of_kind(buckets, "tied"), 2),
        formula="the slice of V D / tp x s, between first and last stage",
        source="Narayanan et al., 2021, section 2.2",
    )


def mirrored_bytes(plan: Plan, part: RankPart, buckets: Buckets) -> SentTerm:
    """Return what two ranks that hold copies of the same stages send to add up gradients."""
    return SentTerm(
        axis=Axis.PP.value,
        name="mirrored stages",
        count=1,
        each=_hop(plan, buckets, 2) if part.mirrored else 0,
        formula="slices x s, between a rank and its mirror",
        source="DeepSeek-V3, 2024, section 3.2.1 (DualPipe keeps two copies of the parameters)",
    )


def muon_bytes(plan: Plan, exchange: MuonExchange, rank: int) -> tuple[SentTerm, ...]:
    """Return what `rank` sends for Newton-Schulz: pieces to owners, results to holders."""
    size = DTYPE_BYTES[plan.mathematics.precision.master]
    pieces, results = muon_elements(exchange, rank)
    source = "Jordan et al., Muon, 2024; who owns which matrix: cost/muon.py"

    def term(name: str, elements: int, formula: str) -> SentTerm:
        return SentTerm(
            axis=STAGE_AXIS,
            name=name,
            count=1,
            each=elements * size,
            formula=formula,
            source=source,
        )

    return (
        term("pieces of matrices", pieces, "own pieces of matrices of others x s"),
        term("orthogonal matrices", results, "own matrices x ranks that hold a piece x s"),
    )


def _all_reduced(plan: Plan, buckets: Buckets, expert: bool) -> SentTerm:
    size, degree = _reduction_size(plan), data_degree(plan, expert=expert)
    return SentTerm(
        axis=EXPERT_DATA_AXIS if expert else DATA_AXIS,
        name="gradients",
        count=1,
        each=sum(all_reduce_bytes(bucket.num_elements * size, degree) for bucket in buckets),
        formula="2 (n-1)/n G s",
        source="Patarasuk and Yuan, 2009",
    )


def _scattered(plan: Plan, part: RankPart, buckets: Buckets, expert: bool) -> Iterator[SentTerm]:
    size, degree = _reduction_size(plan), shard_degree(plan, expert=expert)
    adds = accumulates_slices(plan, expert=expert)
    rounds = {b.name: part.passes(b.stages) if adds else 1 for b in buckets}
    for count, found in _alike(buckets, rounds):
        yield SentTerm(
            axis=EXPERT_SHARD_AXIS if expert else Axis.DP_SHARD.value,
            name="gradients",
            count=count,
            each=sum(reduce_scatter_bytes(slice_elements(plan, b) * size, degree) for b in found),
            formula="(n-1)/n G s",
            source=_ZERO,
        )


def _alike(buckets: Buckets, rounds: Mapping[str, int]) -> Iterator[tuple[int, list[BucketPlan]]]:
    """Yield the buckets by how often they are sent: all alike, but an embedding at both ends."""
    for count in sorted({*rounds.values()}):
        yield count, [bucket for bucket in buckets if rounds[bucket.name] == count]


def _gathered(plan: Plan, part: RankPart, buckets: Buckets, expert: bool) -> Iterator[SentTerm]:
    """Return the gathers of parameters: once per step what stays whole, else before each use."""
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    degree = shard_degree(plan, expert=expert)

    def terms(name: str, found: Buckets, rounds: Callable[[BucketPlan], int]) -> Iterator[SentTerm]:
        for count, alike in _alike(found, {bucket.name: rounds(bucket) for bucket in found}):
            yield SentTerm(
                axis=EXPERT_SHARD_AXIS if expert else Axis.DP_SHARD.value,
                name=name,
                count=count,
                each=sum(all_gather_bytes(slice_elements(plan, b) * size, degree) for b in alike),
                formula="(n-1)/n G s",
                source=_ZERO,
            )

    if not plan.layout.zero.reshard_after_forward:
        yield from terms("parameters", buckets, lambda bucket: 1)
        return
    sliced = [bucket for bucket in buckets if bucket.sliced]
    whole = [bucket for bucket in buckets if not bucket.sliced]
    yield from terms("parameters", whole, lambda bucket: 1)
    yield from terms("parameters forward", sliced, lambda b: part.passes(b.stages))
    yield from terms("parameters backward", sliced, lambda b: part.passes(b.backward_stages))


def _replicas(plan: Plan, buckets: Buckets) -> SentTerm:
    return SentTerm(
        axis=Axis.DP_REPLICATE.value,
        name="gradients",
        count=1,
        each=_hop(plan, buckets, plan.mesh.dp_replicate),
        formula="2 (n-1)/n x slices x s",
        source="Zhao et al., PyTorch FSDP, 2023, section 3.2.2 (hybrid sharding)",
    )


def _hop(plan: Plan, buckets: Iterable[BucketPlan], degree: int) -> int:
    """Return the bytes of an all-reduce of the slice of each bucket."""
    size = _reduction_size(plan)
    return sum(all_reduce_bytes(slice_elements(plan, b) * size, degree) for b in buckets)


def _of_kind(buckets: Buckets, kind: str) -> list[BucketPlan]:
    return [bucket for bucket in buckets if bucket.kind == kind]


def _reduction_size(plan: Plan) -> int:
    return DTYPE_BYTES[plan.mathematics.precision.reduction]
