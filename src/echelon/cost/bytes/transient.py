# SPDX-License-Identifier: Apache-2.0
"""What a rank holds only while a step runs: the most that it can be, by kind and pool.

Not counted: activations, what a communication library keeps for itself, and the inside of a
computation (Newton-Schulz); but for attention over context ranks, which holds the keys of others.

- Stage 3: units of parameters that are whole. While a unit is used, it and the `prefetch` units
  after it are; a bucket that several units use (a tied embedding on one stage) stays whole from the
  first to the last of them. Without `reshard_after_forward` every unit stays whole.
- Gradients that add up in slices: whole buckets, while they fill and until their sum has left.
- What is on the wire where that is a copy: gradients in another dtype, slices to be added. Sums
  over other axes (replicas, tensor ranks, both ends) are all awaited when backward is over.
- Own algorithms of sums: what arrives to be added, beside the gradients or rows that are summed.
- Muon: whole matrices at their owners, and the messages, for a few buckets at a time.
- Offload: the sets of tensors (one bucket's) that are read ahead or written behind.
- Context ranks: attention of one block at a time, beside what waits for backward
  (`cost/bytes/context_memory.py`).
- Symmetric memory of tensor ranks, where fused products read one another's chunks.
- Expert ranks: rows on their way to the experts of one block and back, if every expert gets as many
  (`cost/bytes/expert_memory.py`). That is no bound: the term says what it is if one rank gets
  them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from echelon.core.axis import Axis
from echelon.core.choices.collective_algorithms import BACKEND
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.disk import round_up_to_pages
from echelon.core.plan import DTYPE_BYTES, OffloadTarget, Plan
from echelon.cost.bytes.all_reduce import sum_group
from echelon.cost.bytes.context_memory import most_attention_memory
from echelon.cost.bytes.expert_memory import rows_in_dispatch
from echelon.cost.bytes.quantised import (
    gathered_element_bytes,
    int8_encoding_bytes,
    int8_message_bytes,
    quantised_sum_copies,
    second_hop_copies,
)
from echelon.cost.bytes.terms import HeldTerm, Pool
from echelon.layout.buckets import (
    UNIT_EMBEDDING,
    UNIT_HEAD,
    BucketPlan,
    accumulates_slices,
    plan_buckets,
    shard_degree,
    slice_elements,
    stage_units,
    zero_stage,
)
from echelon.layout.data_groups import end_ranks, gradient_ranks, mirror_ranks, shard_ranks
from echelon.layout.expert_load import expert_blocks
from echelon.layout.muon import muon_exchange
from echelon.layout.slots import trained_buckets
from echelon.layout.stage import RankPart, rank_part

BUCKETS_IN_FLIGHT = 2
"""Buckets whose sum may be under way while another one fills, where memory waits for its end."""

WHOLE_UNITS = "whole units of parameters"
"""Name of the term of gathered parameters."""
ATTENTION = "attention over context ranks"
"""Name of the term of keys of other ranks, and of scores."""

MUON_IN_FLIGHT = 4
"""Buckets of matrices whose pieces or results are on their way at a time."""

Buckets = Sequence[BucketPlan]


def transient_terms(plan: Plan, pp_rank: int) -> tuple[HeldTerm, ...]:
    """Return the most that a pipeline rank holds beside its model state, by kind and pool."""
    part = rank_part(plan, pp_rank)
    buckets = plan_buckets(plan, part)
    trained = trained_buckets(buckets)
    terms = (
        _gathered(plan, part, buckets),
        _filling(plan, trained),
        _copies(plan, part, trained),
        arriving_term(plan, pp_rank, trained),
        *_muon(plan, pp_rank, trained),
        *_blocks(plan, part),
        *_symmetric_memory(plan, part),
        *offload_buffer_terms(plan, pp_rank),
    )
    return tuple(term for term in terms if term.bytes)


def most_whole_bytes(plan: Plan, part: RankPart, buckets: Buckets) -> int:
    """Return the most bytes of sliced buckets that are whole at one time (stage 3)."""
    sliced = [bucket for bucket in buckets if bucket.sliced]
    if not plan.layout.zero.reshard_after_forward:
        return sum(_whole_bytes(plan, bucket) for bucket in sliced)
    most = 0
    for stage in part.stages:
        order = stage_units(stage)
        forward = [(_within(b.units, order), _whole_bytes(plan, b)) for b in sliced]
        backward = [(_within(b.backward_units, order), _whole_bytes(plan, b)) for b in sliced]
        for there, used in ((order, forward), (order[::-1], backward)):
            most = max(most, _most_whole(plan, there, [(u, n) for u, n in used if u]))
    return most


def _whole_bytes(plan: Plan, bucket: BucketPlan) -> int:
    values = bucket.num_elements * gathered_element_bytes(plan, bucket)
    return values + int8_message_bytes(plan, bucket)


def _within(units: Sequence[str], order: Sequence[str]) -> tuple[str, ...]:
    """Return those of `units` that are of one stage, whose units are `order`."""
    return tuple(unit for unit in units if unit in order)


def parameter_buffers(plan: Plan, pp_rank: int) -> int:
    """Return how many sets of offloaded parameters a rank reads at once.

    A set is one bucket's slice. All that is gathered for the units in use and ahead must have its
    buffer, or a gather would wait for itself (with Muon a unit is two buckets); `offload_buffers`
    are those of the unit that is read meanwhile, and of the one in use.
    """
    part, ahead = rank_part(plan, pp_rank), plan.layout.zero.prefetch
    sliced = [bucket for bucket in plan_buckets(plan, part) if bucket.sliced]
    most = max(
        sum(
            any(unit in bucket.units for unit in order[here : here + 1 + ahead])
            for bucket in sliced
        )
        for order in map(stage_units, part.stages)
        for here in range(max(1, len(order)))
    )
    return most + plan.layout.zero.offload_buffers - 1


def _most_whole(
    plan: Plan, order: Sequence[str], used: Sequence[tuple[tuple[str, ...], int]]
) -> int:
    """Return the most bytes that are whole while the units of `order` run one by one."""
    ahead = plan.layout.zero.prefetch
    most = 0
    for here in range(len(order)):
        whole = 0
        for units, size in used:
            places = [order.index(unit) for unit in units]
            coming = any(here <= place <= here + ahead for place in places)
            whole += size * (coming or min(places) <= here <= max(places))
        most = max(most, whole)
    return most


def _gathered(plan: Plan, part: RankPart, buckets: Buckets) -> HeldTerm:
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    most = most_whole_bytes(plan, part, buckets)
    most += max((int8_encoding_bytes(plan, bucket) for bucket in buckets), default=0)
    numbers = f"{most // size:,} x {size}"
    if any(bucket.fp8_squares for bucket in buckets):
        numbers = f"{most:,} bytes of codes, and of what is not multiplied in 8 bits x {size}"
    if any(bucket.int8_blocks for bucket in buckets):
        numbers = f"{most:,} bytes of parameters, and of what they are made of in int8"
    kept = f"{1 + plan.layout.zero.prefetch} units"
    which = kept if plan.layout.zero.reshard_after_forward else "all units"
    return HeldTerm(name=WHOLE_UNITS, bytes=most, formula=f"{which}: {numbers}")


def _filling(plan: Plan, buckets: Buckets) -> HeldTerm:
    """Bound the whole buckets of gradients, where slices add up.

    Buckets fill one after the other, those of each update rule for themselves; but one that holds
    parameters of all blocks (norms, small ones) fills as long as backward runs, and a tied
    embedding from the first gradient to the last.
    """
    size = DTYPE_BYTES[plan.mathematics.precision.gradients]
    added = [b for b in buckets if accumulates_slices(plan, expert=b.expert)]
    aside = [bucket for bucket in added if _fills_long(plan, bucket)]
    rest = [bucket for bucket in added if bucket not in aside]
    coded = {one.name for one in rest if one.fp8_squares or one.int8_blocks}
    num_rules = len({(one.update, one.expert, one.name in coded) for one in rest})
    elements = sum(bucket.num_elements for bucket in aside)
    largest = sorted((bucket.num_elements for bucket in rest), reverse=True)
    elements += sum(largest[: BUCKETS_IN_FLIGHT + num_rules])
    return _elements_term("whole gradients", elements, size)


def _fills_long(plan: Plan, bucket: BucketPlan) -> bool:
    aside = zero_stage(plan, expert=bucket.expert) == 3 and not bucket.sliced
    both_ends = {UNIT_EMBEDDING, UNIT_HEAD} <= {*bucket.units} and len(bucket.stages) == 1
    return aside or both_ends or bucket.kind != "whole"


def _copies(plan: Plan, part: RankPart, buckets: Buckets) -> HeldTerm:
    """Bound the copies that are on the wire: whole in another dtype, and slices to be added.

    Over Gloo a rank adds up its slices itself, from the slices that the others send it, unless by
    an algorithm of steps (`arriving_term`). Where there are any copies, only so many first sums are
    under way; later ones are not bounded.
    """
    precision = plan.mathematics.precision
    cast = precision.reduction != precision.gradients
    size = DTYPE_BYTES[precision.reduction]

    def copies(bucket: BucketPlan) -> int:
        expert = bucket.expert
        if codes := quantised_sum_copies(plan, bucket):
            return -(-(codes + second_hop_copies(plan, bucket)) // size) + slice_elements(
                plan, bucket
            )
        received = shard_degree(plan, expert=expert) - 1 if adds_slices_itself(plan, expert) else 0
        adds = cast or accumulates_slices(plan, expert=expert)
        slices = received + (zero_stage(plan, expert=expert) > 0 and adds)
        return cast * bucket.num_elements + slices * slice_elements(plan, bucket)

    copied = sorted(map(copies, buckets), reverse=True)
    elements = sum(copied[: 1 + BUCKETS_IN_FLIGHT])
    elements += cast * sum(slice_elements(plan, b) for b in buckets if _summed_again(plan, part, b))
    return _elements_term("gradients being summed", elements, size)


def adds_slices_itself(plan: Plan, expert: bool) -> bool:
    """Return whether a rank is sent the slices of all others at once, and keeps them until then."""
    if plan.cluster.backend != "gloo" or not zero_stage(plan, expert=expert):
        return False
    return not sum_group(plan, shard_ranks(plan, 0, expert=expert), 0).scatters


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivingSum:
    """Say what lands beside a bucket at the member of a group where most does, in bytes."""

    ranks: tuple[int, ...]
    bytes: int
    each_time: bool = False
    """Whether it does whenever the bucket is full, or only at the end of a step."""


def arriving_term(plan: Plan, pp_rank: int, buckets: Buckets) -> HeldTerm:
    """Bound what sums by messages receive beside their tensors, of buckets and of rows.

    A group runs one of its sums at a time (`parallel/transport/algorithms.py`).
    """
    part = rank_part(plan, pp_rank)
    most = {plan.mesh.group(part_rank(plan, part), Axis.TP): arriving_row_bytes(plan, part)}
    for bucket in buckets:
        for one in arriving_sums(plan, part, bucket):
            most[one.ranks] = max(most.get(one.ranks, 0), one.bytes)
    formula = " + ".join(f"{count:,}" for count in most.values() if count)
    return HeldTerm(name="arriving chunks of sums", bytes=sum(most.values()), formula=formula)


def arriving_sums(plan: Plan, part: RankPart, bucket: BucketPlan) -> tuple[ArrivingSum, ...]:
    """Return what sums of a bucket by messages land beside it; none where a library sums.

    Data ranks sum a whole bucket, or those of a replica slices of it, unless in codes; then
    replicas, tensor ranks, and ranks of other stages sum the slices.
    """
    if plan.layout.collectives.algorithm == BACKEND:
        return ()
    rank, expert = part_rank(plan, part), bucket.expert
    size, piece = DTYPE_BYTES[plan.mathematics.precision.reduction], slice_elements(plan, bucket)
    found: list[ArrivingSum] = []
    if not zero_stage(plan, expert=expert):
        later = [gradient_ranks(plan, rank, expert=expert)]
    else:
        later = [plan.mesh.group(rank, Axis.DP_REPLICATE)]
        ranks = shard_ranks(plan, rank, expert=expert)
        slices = sum_group(plan, ranks, rank)
        if slices.scatters and not quantised_sum_copies(plan, bucket):
            beside = slices.slices_beside() * piece * size
            found.append(ArrivingSum(ranks=ranks, bytes=beside, each_time=True))
    if bucket.kind == "partial":
        later.append(plan.mesh.group(rank, Axis.TP))
    if bucket.kind == "tied":
        later.append(end_ranks(plan, rank))
    if part.mirrored:
        later.append(mirror_ranks(plan, rank))
    for ranks in later:
        elements = sum_group(plan, ranks, rank).most_arriving_elements(piece)
        if elements:
            found.append(ArrivingSum(ranks=ranks, bytes=elements * size))
    return tuple(found)


def arriving_row_bytes(plan: Plan, part: RankPart) -> int:
    """Return what sums of rows over tensor ranks land beside them at most; 0 where a library sums.

    The widest rows are those of the residual stream.
    """
    rank = part_rank(plan, part)
    sums = sum_group(plan, plan.mesh.group(rank, Axis.TP), rank)
    rows = plan.local_tokens * plan.model.hidden
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    if not plan.layout.sequence_parallel:
        return sums.most_arriving_elements(rows) * size
    return sums.slices_beside() * (rows // plan.mesh.tp) * size if sums.scatters else 0


def part_rank(plan: Plan, part: RankPart) -> int:
    """Return the first rank of a place of the pipeline."""
    return plan.mesh.rank({Axis.PP: part.pp_rank})


def _elements_term(name: str, elements: int, size: int) -> HeldTerm:
    return HeldTerm(name=name, bytes=elements * size, formula=f"{elements:,} x {size}")


def _summed_again(plan: Plan, part: RankPart, bucket: BucketPlan) -> bool:
    """Return whether the sum over data ranks is followed by one over another axis."""
    replicas = zero_stage(plan, expert=bucket.expert) > 0 and plan.mesh.dp_replicate > 1
    return replicas or part.mirrored or bucket.kind != "whole"


def _muon(plan: Plan, pp_rank: int, buckets: Buckets) -> Iterator[HeldTerm]:
    """Bound the matrices that a rank owns, and its messages: pieces and results."""
    if not OPTIMIZERS[plan.mathematics.optimizer.kind].needs_whole_matrices:
        return
    matrices = [bucket for bucket in buckets if OPTIMIZERS[bucket.update].needs_whole_matrices]
    elements = 0
    for expert_index in range(plan.mesh.ep):
        exchange = muon_exchange(plan, pp_rank, expert_index)
        owned: Counter[tuple[int, str]] = Counter()
        for matrix in exchange.matrices:
            owned[matrix.owner, matrix.pieces[0].bucket] += prod(matrix.shape)
        for rank in exchange.ranks:
            sizes = [2 * owned[rank, b.name] + slice_elements(plan, b) for b in matrices]
            elements = max(elements, sum(sorted(sizes, reverse=True)[:MUON_IN_FLIGHT]))
    size = DTYPE_BYTES[plan.mathematics.precision.master]
    yield _elements_term("matrices of Muon", elements, size)


def _blocks(plan: Plan, part: RankPart) -> Iterator[HeldTerm]:
    """Bound what one block holds while it runs: attention over context ranks, rows to experts.

    Attention is that of the context rank with most of it.
    """
    if plan.mesh.cp > 1 and part.blocks:
        peak = most_attention_memory(plan).peak
        yield HeldTerm(name=ATTENTION, bytes=peak.bytes, formula=f"{peak.name}: {peak.formula}")
    if any(expert_blocks(plan, stage) for stage in part.stages):
        yield rows_in_dispatch(plan)


def _symmetric_memory(plan: Plan, part: RankPart) -> Iterator[HeldTerm]:
    """Return the memory that other tensor ranks read: two chunks of a sum, for one is read while
    the next is made. It stays between steps.
    """
    if plan.layout.tp_overlap == "symmetric-memory" and part.blocks:
        size = DTYPE_BYTES[plan.mathematics.precision.parameters]
        chunk = plan.local_tokens // plan.mesh.tp * plan.model.hidden * size
        yield HeldTerm(name="symmetric memory", bytes=2 * chunk, formula=f"2 x {chunk:,}")


def offload_buffer_terms(plan: Plan, pp_rank: int) -> Iterator[HeldTerm]:
    """Bound the sets that are read ahead of their use or wait to be written, in whole pages."""
    buckets = plan_buckets(plan, rank_part(plan, pp_rank))
    zero, precision = plan.layout.zero, plan.mathematics.precision
    master, size = DTYPE_BYTES[precision.master], DTYPE_BYTES[precision.parameters]

    def updated(bucket: BucketPlan) -> int:
        tensors = precision.has_master + len(OPTIMIZERS[bucket.update].state)
        return tensors * round_up_to_pages(slice_elements(plan, bucket) * master)

    def read(bucket: BucketPlan) -> int:
        return round_up_to_pages(slice_elements(plan, bucket) * size)

    state = max(map(updated, trained_buckets(buckets)), default=0)
    values = max((read(bucket) for bucket in buckets if bucket.sliced), default=0)
    places: tuple[tuple[OffloadTarget, str, int, int], ...] = (
        (zero.optimizer_offload, "buffers of optimizer state", zero.offload_buffers, state),
        (zero.parameter_offload, "buffers of parameters", parameter_buffers(plan, pp_rank), values),
    )
    for home, name, count, each in places:
        for pool in buffer_pools(plan, home):
            yield HeldTerm(name=name, pool=pool, bytes=count * each, formula=f"{count} x {each:,}")


def buffer_pools(plan: Plan, home: OffloadTarget) -> Iterator[Pool]:
    """Yield where the buffers are: files are read into host memory, and from there onto a GPU."""
    if home == "nvme":
        yield "host"
    if home != "none" and plan.cluster.backend == "nccl":
        yield "device"
