# SPDX-License-Identifier: Apache-2.0
"""Bytes that data parallelism and ZeRO send in one optimizer step, bucket by bucket.

`G` is the elements of all buckets (padding included), `n` the degree of the axis, `s` the bytes of
an element as it is sent: gradients in the dtype `reduction`, parameters in `parameters`, Muon's
pieces in `master`. `M` is the microbatches per step, a slice the part of a bucket that a rank
updates: G over the degree of `dp_shard x cp`, all of it at stage 0.

A bucket is reduced over data ranks first; what other axes still have to add up (norms under
sequence parallelism, a tied embedding, replicas) is added to the slice only, once per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from echelon.core.axis import LOSS_AXES, Axis
from echelon.core.choices.collective_algorithms import COLLECTIVE_ALGORITHMS
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.all_reduce import pairs_sent, ring_sent, slices_sent, sum_group, sums_sent
from echelon.cost.bytes.quantised import (
    gathered_element_bytes,
    gathered_piece_bytes,
    largest_number_bytes,
    quantised_sum_terms,
)
from echelon.cost.bytes.terms import SentTerm, all_gather_bytes
from echelon.layout.buckets import (
    BucketPlan,
    accumulates_slices,
    slice_elements,
    zero_stage,
)
from echelon.layout.data_groups import (
    end_ranks,
    gradient_ranks,
    hop_degrees,
    mirror_ranks,
    secondary_degree,
    secondary_elements,
    shard_ranks,
)
from echelon.layout.muon import MuonExchange, muon_elements
from echelon.layout.slots import trained_buckets
from echelon.layout.stage import RankPart

COUNT_BYTES = 8
"""The token count that data ranks exchange: one int64."""

DATA_AXIS = "dp"
"""All data ranks: `dp_replicate` x `dp_shard` x `cp`."""

EXPERT_DATA_AXIS = "edp"
"""All ranks of a stage that hold the same experts."""

EXPERT_SHARD_AXIS = "edp_shard"
"""Those of one replica, over which ZeRO cuts experts."""

SHARD_WITHIN_AXIS, EXPERT_SHARD_WITHIN_AXIS = "dp_shard_within", "edp_shard_within"
"""Those of `dp_shard` x `cp`, or of the same experts, on one node: they keep secondary slices."""

SHARD_ACROSS_AXIS, EXPERT_SHARD_ACROSS_AXIS = "dp_shard_across", "edp_shard_across"
"""Those of them with the same place on each node."""

STAGE_AXIS = "stage"
"""All ranks of one pipeline stage: data ranks x tensor ranks."""

GATHERED = ("parameters", "codes")
"""What gathers are of; the names of their terms begin so."""

_TREE_FORMULA = "what is summed, to the parent and to each child"
_ZERO = "Rajbhandari et al., ZeRO, 2020, section 7"

Buckets = Sequence[BucketPlan]


def data_bytes(
    plan: Plan, part: RankPart, buckets: Buckets, rank: int | None = None
) -> tuple[SentTerm, ...]:
    """Return the terms of the axes "dp", "dp_shard" and "dp_replicate", and those of experts.

    What a member of an all-reduce sends may depend on its place, where sizes are odd or the
    algorithm is a tree: without `rank` these are the first rank's, which no other exceeds by more
    than a chunk's odd element.
    """
    rank = plan.mesh.rank({Axis.PP: part.pp_rank}) if rank is None else rank
    counted, counted_far = pairs_sent(plan, plan.mesh.group(rank, *LOSS_AXES), rank, COUNT_BYTES)
    count = SentTerm(
        axis=DATA_AXIS,
        name="token count",
        each=counted,
        far=counted_far,
        formula="(n-1) x 8",
        source="the loss has one denominator, known before backward",
    )
    terms: list[SentTerm] = []
    for expert in (False, True):
        alike = [bucket for bucket in buckets if bucket.expert is expert]
        trained = trained_buckets(alike)
        if zero_stage(plan, expert=expert) == 0:
            terms.append(_all_reduced(plan, trained, rank, expert=expert))
        else:
            terms += _scattered(plan, part, trained, expert, rank)
            # What is frozen is gathered where it is cut alone.
            moving = [bucket for bucket in alike if bucket.sliced or not bucket.frozen]
            terms += _gathered(plan, part, moving, rank)
            terms.append(_largest_of_squares(plan, alike, expert, rank))
            terms.append(_replicas(plan, trained, rank))
    return (*terms, count)


def partial_bytes(plan: Plan, buckets: Buckets, rank: int) -> SentTerm:
    """Return what tensor ranks send to add up gradients of which each sees a part."""
    partial = [bucket for bucket in buckets if bucket.kind == "partial"]
    each, far = _sums_of_slices(plan, partial, plan.mesh.group(rank, Axis.TP), rank)
    return SentTerm(
        axis=Axis.TP.value,
        name="replicated parameters",
        each=each,
        far=far,
        formula="2 (n-1)/n x slices of norms and output biases x s",
        source="Korthikanti et al., 2022, section 4.2.2",
    )


def tied_bytes(plan: Plan, buckets: Buckets, rank: int) -> SentTerm:
    """Return what the two ends of a pipeline send to add up the gradient of a tied embedding."""
    tied = [bucket for bucket in buckets if bucket.kind == "tied"]
    each, far = _sums_of_slices(plan, tied, end_ranks(plan, rank), rank) if tied else (0, 0)
    return SentTerm(
        axis=Axis.PP.value,
        name="tied embedding",
        each=each,
        far=far,
        formula="the slice of V D / tp x s, between first and last stage",
        source="Narayanan et al., 2021, section 2.2",
    )


def mirrored_bytes(plan: Plan, part: RankPart, buckets: Buckets, rank: int) -> SentTerm:
    """Return what two ranks that hold copies of the same stages send to add up gradients."""
    pair = mirror_ranks(plan, rank)
    trained = trained_buckets(buckets)
    each, far = _sums_of_slices(plan, trained, pair, rank) if part.mirrored else (0, 0)
    return SentTerm(
        axis=Axis.PP.value,
        name="mirrored stages",
        each=each,
        far=far,
        formula="slices x s, between a rank and its mirror",
        source="DeepSeek-V3, 2024, section 3.2.1 (DualPipe keeps two copies of the parameters)",
    )


def muon_bytes(plan: Plan, exchange: MuonExchange, rank: int) -> tuple[SentTerm, ...]:
    """Return what `rank` sends for Newton-Schulz: pieces to owners, results to holders."""
    size = DTYPE_BYTES[plan.mathematics.precision.master]
    pieces, results = muon_elements(exchange, rank)
    source = "Jordan et al., Muon, 2024; who owns which matrix: layout/muon.py"

    def term(name: str, elements: int, formula: str) -> SentTerm:
        return SentTerm(
            axis=STAGE_AXIS, name=name, each=elements * size, formula=formula, source=source
        )

    return (
        term("pieces of matrices", pieces, "own pieces of matrices of others x s"),
        term("orthogonal matrices", results, "own matrices x ranks that hold a piece x s"),
    )


def _all_reduced(plan: Plan, buckets: Buckets, rank: int, *, expert: bool) -> SentTerm:
    size, group = _reduction_size(plan), gradient_ranks(plan, rank, expert=expert)
    algorithm = sum_group(plan, group, rank).algorithm
    elements = (bucket.num_elements for bucket in buckets)
    each, far = sums_sent(plan, group, rank, elements, size)
    return SentTerm(
        axis=EXPERT_DATA_AXIS if expert else DATA_AXIS,
        name="gradients",
        each=each,
        far=far,
        formula=_TREE_FORMULA if algorithm == "tree" else "2 (n-1)/n G s",
        source=COLLECTIVE_ALGORITHMS[algorithm].source,
    )


def _scattered(
    plan: Plan, part: RankPart, buckets: Buckets, expert: bool, rank: int
) -> Iterator[SentTerm]:
    size, adds = _reduction_size(plan), accumulates_slices(plan, expert=expert)
    rounds = {b.name: part.passes(b.stages) if adds else 1 for b in buckets}
    if hop_degrees(plan, expert=expert) != (1, 1):
        axes = (SHARD_WITHIN_AXIS, SHARD_ACROSS_AXIS)
        own = (EXPERT_SHARD_WITHIN_AXIS, EXPERT_SHARD_ACROSS_AXIS)
        return quantised_sum_terms(plan, buckets, rounds, own if expert else axes)
    return _sliced(plan, "gradients", buckets, rounds, rank, size)


def _gathered(plan: Plan, part: RankPart, buckets: Buckets, rank: int) -> Iterator[SentTerm]:
    """Yield the gathers of parameters: once per step what stays whole, else before each use.

    Where ranks keep secondary slices, all but the first of a step are inside of nodes.
    """
    again = plan.layout.zero.reshard_after_forward
    whole = [bucket for bucket in buckets if not (again and bucket.sliced)]
    sliced = [bucket for bucket in buckets if again and bucket.sliced]
    forward = {b.name: part.passes(b.stages) for b in sliced}
    backward = {b.name: part.passes(b.backward_stages) for b in sliced}
    for coded, what in zip((False, True), GATHERED, strict=True):
        alike = [b for b in buckets if bool(b.fp8_squares or b.int8_blocks) is coded]
        far = [b for b in alike if not secondary_elements(plan, b)]
        near = [b for b in alike if secondary_elements(plan, b)]
        once = {b.name: 1 for b in alike if b in whole}
        yield from _sliced(plan, what, alike, once, rank)
        yield from _sliced(plan, f"{what} forward", far, forward, rank)
        yield from _sliced(plan, f"{what} backward", far, backward, rank)
        first = {b.name: min(1, forward[b.name]) for b in near}
        later = {name: forward[name] - count for name, count in first.items()}
        yield from _sliced(plan, f"{what} forward, first", near, first, rank)
        yield from _in_nodes(plan, f"{what} forward", near, later)
        yield from _in_nodes(plan, f"{what} backward", near, backward)


def _largest_of_squares(plan: Plan, buckets: Buckets, expert: bool, rank: int) -> SentTerm:
    """Return the exchange of the largest numbers of squares, of which scales are made."""
    size = largest_number_bytes(plan.mathematics.precision)
    squares = sum(bucket.fp8_squares for bucket in buckets)
    ranks = shard_ranks(plan, rank, expert=expert)
    each, far = ring_sent(plan, ranks, rank, squares * size)
    return SentTerm(
        axis=EXPERT_SHARD_AXIS if expert else Axis.DP_SHARD.value,
        name="largest numbers of squares",
        each=each,
        far=far,
        formula="2 (n-1)/n x squares x s",
        source="Patarasuk and Yuan, 2009; PyTorch's torchao makes scales of FSDP2's slices so",
    )


def _sliced(
    plan: Plan,
    name: str,
    buckets: Buckets,
    rounds: Mapping[str, int],
    rank: int,
    size: int | None = None,
) -> Iterator[SentTerm]:
    """Yield what is scattered or gathered, the same bytes, of buckets by how often they are.

    All are as often but an embedding at both ends. An element takes `size` bytes, without that
    those of what is gathered of it.
    """

    def piece(bucket: BucketPlan) -> int:
        if size is None:
            return gathered_piece_bytes(plan, bucket)
        return slice_elements(plan, bucket) * size

    for count in sorted({rounds[b.name] for b in buckets if b.name in rounds}):
        alike = [bucket for bucket in buckets if rounds.get(bucket.name) == count]
        expert = alike[0].expert
        ranks = shard_ranks(plan, rank, expert=expert)
        each, far = slices_sent(plan, ranks, rank, sum(map(piece, alike)))
        yield SentTerm(
            axis=EXPERT_SHARD_AXIS if expert else Axis.DP_SHARD.value,
            name=name,
            count=count,
            each=each,
            far=far,
            formula="(n-1)/n G s",
            source=_ZERO,
        )


def _in_nodes(
    plan: Plan, name: str, buckets: Buckets, rounds: Mapping[str, int]
) -> Iterator[SentTerm]:
    """Yield what the ranks of a node gather of their secondary slices, by how often they do."""

    def piece(bucket: BucketPlan) -> int:
        return secondary_elements(plan, bucket) * gathered_element_bytes(plan, bucket)

    for count in sorted({rounds[b.name] for b in buckets}):
        alike = [bucket for bucket in buckets if rounds[bucket.name] == count]
        expert = alike[0].expert
        degree = secondary_degree(plan, expert=expert)
        yield SentTerm(
            axis=EXPERT_SHARD_WITHIN_AXIS if expert else SHARD_WITHIN_AXIS,
            name=f"{name}, in nodes",
            count=count,
            each=sum(all_gather_bytes(piece(bucket), degree) for bucket in alike),
            far=0,
            formula="(l-1)/l G s",
            source="Wang et al., ZeRO++, 2023, section 3.2 (hpZ)",
        )


def _replicas(plan: Plan, buckets: Buckets, rank: int) -> SentTerm:
    group = plan.mesh.group(rank, Axis.DP_REPLICATE)
    algorithm = sum_group(plan, group, rank).algorithm
    each, far = _sums_of_slices(plan, buckets, group, rank)
    return SentTerm(
        axis=Axis.DP_REPLICATE.value,
        name="gradients",
        each=each,
        far=far,
        formula=_TREE_FORMULA if algorithm == "tree" else "2 (n-1)/n x slices x s",
        source="Zhao et al., PyTorch FSDP, 2023, section 3.2.2 (hybrid sharding)",
    )


def _sums_of_slices(
    plan: Plan, buckets: Iterable[BucketPlan], ranks: tuple[int, ...], rank: int
) -> tuple[int, int]:
    """Return what `rank` sends to sum the slice of each bucket over `ranks`, and how much far."""
    slices = (slice_elements(plan, bucket) for bucket in buckets)
    return sums_sent(plan, ranks, rank, slices, _reduction_size(plan))


def _reduction_size(plan: Plan) -> int:
    return DTYPE_BYTES[plan.mathematics.precision.reduction]
