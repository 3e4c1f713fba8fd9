# SPDX-License-Identifier: Apache-2.0
"""Islands of local SGD: the plan of each, its ranks, and what of a rank's slices meets when.

To everything inside of it an island is a plan of its own: the same mesh without `dp_replicate`, and
its share of the samples. So all that is known of plans (buckets, bytes, seconds, the oracle) holds
for an island; what islands send each other is beside it.

What meets is a fragment of the model: of each bucket, the part of a rank's slice in which
parameters of that fragment lie, in runs that are as long as may be.

In 8 bits, blocks of outer gradients share a scale: they are cut by the model, and by no layout. A
block is `outer_block` consecutive numbers of a row of a parameter, the last one of a row the rest;
a vector is one row. Ranks of an island that hold pieces of a block find its largest number
together, so the same numbers have the same codes whoever holds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from echelon.core.axis import Axis
from echelon.core.choices.local_sgd import LocalSgd
from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Plan
from echelon.layout.buckets import UNIT_HEAD, plan_buckets, slice_elements, slice_index, unit_of
from echelon.layout.slots import SlotRange, slot_ranges
from echelon.layout.stage import (
    held_parameters,
    part_of,
    pieces_of,
    pp_rank_of,
    rank_part,
    stage_parameters,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """Say which island a rank is in, and which of its ranks it is."""

    index: int
    first_rank: int
    size: int

    def local(self, rank: int) -> int:
        """Return which rank of the island a rank of the run is."""
        return rank - self.first_rank

    def lifted(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return ranks of the island as those of the run."""
        return tuple(self.first_rank + rank for rank in ranks)


def islands_of(plan: Plan) -> tuple[Island, ...]:
    """Return the islands of a plan; none where gradients are summed over all ranks in each step."""
    local = plan.mathematics.local_sgd
    if not local.active:
        return ()
    size = plan.mesh.world_size // local.islands
    return tuple(
        Island(index=index, first_rank=index * size, size=size) for index in range(local.islands)
    )


def island_of(plan: Plan, rank: int) -> Island | None:
    """Return the island of a rank of the run; None where there is none."""
    found = islands_of(plan)
    return found[plan.mesh.coordinates(rank)[Axis.DP_REPLICATE]] if found else None


def island_plan(plan: Plan, index: int) -> Plan:
    """Return what an island runs by itself: its mesh, and its share of the global batch.

    That is rows `index` x B / I to (`index` + 1) x B / I - 1 of B, for I islands.
    """
    mathematics, local = plan.mathematics, plan.mathematics.local_sgd
    return replace(
        plan,
        mathematics=replace(
            mathematics,
            global_sequences=mathematics.global_sequences // local.islands,
            local_sgd=local.part(index),
        ),
        layout=replace(
            plan.layout, mesh=replace(plan.mesh, dp_replicate=1, replicas_outermost=False)
        ),
    )


def without_losses(plan: Plan) -> Plan:
    """Return a plan whose islands end together: what it computes where it loses none."""
    undisturbed = plan.mathematics.local_sgd.undisturbed()
    return replace(plan, mathematics=replace(plan.mathematics, local_sgd=undisturbed))


def inner_plan(plan: Plan) -> Plan:
    """Return the plan of the first island, which has all that islands have in common."""
    return island_plan(plan, 0) if plan.mathematics.local_sgd.active else plan


def whole_batch_plan(plan: Plan) -> Plan:
    """Return the plan of an island with the batch of all of them."""
    mathematics = plan.mathematics
    return replace(
        plan,
        mathematics=replace(
            mathematics,
            global_sequences=mathematics.global_sequences * mathematics.local_sgd.islands,
            local_sgd=LocalSgd(),
        ),
    )


def plan_and_rank(plan: Plan, rank: int) -> tuple[Plan, int]:
    """Return the plan that a rank runs and its place in it: of its island, where there is one."""
    island = island_of(plan, rank)
    if island is None:
        return plan, rank
    return island_plan(plan, island.index), island.local(rank)


def fragment_ranges(
    local: LocalSgd, placed: Sequence[SlotRange], own: range
) -> tuple[tuple[range, ...], ...]:
    """Return for each fragment the runs of its parameters in a slice, counted from its start.

    `placed` are the parameters of a bucket in their order, `own` what the slice is of it.
    """
    found: list[list[range]] = [[] for _ in range(local.fragments)]
    for one in placed:
        start, stop = max(one.start, own.start), min(one.stop, own.stop)
        if start >= stop:
            continue
        runs = found[fragment_of(local, one.spec)]
        here = range(start - own.start, stop - own.start)
        if runs and runs[-1].stop == here.start:
            runs[-1] = range(runs[-1].start, here.stop)
        else:
            runs.append(here)
    return tuple(map(tuple, found))


def fragment_of(local: LocalSgd, spec: ParameterSpec) -> int:
    """Return the fragment that a parameter meets in."""
    return local.fragment_of(spec.layer, is_last=unit_of(spec.name) == UNIT_HEAD)


def slice_fragments(plan: Plan, rank: int) -> tuple[tuple[tuple[range, ...], ...], ...]:
    """Return, for each bucket of a rank of a plan with islands, the runs of each fragment."""
    local, (inner, place) = plan.mathematics.local_sgd, plan_and_rank(plan, rank)
    part = part_of(inner, place)
    specs = {spec.name: spec for spec in held_parameters(inner, part)}
    found: list[tuple[tuple[range, ...], ...]] = []
    for bucket in plan_buckets(inner, part):
        size = slice_elements(inner, bucket)
        index = slice_index(inner, place, expert=bucket.expert)
        placed = slot_ranges(inner, bucket, specs)
        found.append(fragment_ranges(local, placed, range(index * size, (index + 1) * size)))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentBlocks:
    """Number the blocks of a fragment in a pipeline stage: where those of each parameter begin."""

    first: Mapping[str, int]
    total: int


def blocks_in_stage(plan: Plan, rank: int, fragment: int) -> FragmentBlocks:
    """Return the blocks of a fragment that the stage ranks of `rank` have, all experts among them.

    `plan` is that of all islands.
    """
    inner, place = plan_and_rank(plan, rank)
    local, part = plan.mathematics.local_sgd, rank_part(inner, pp_rank_of(inner, place))
    names = {s.name: s for stage in part.stages for s in stage_parameters(inner, stage, None)}
    first: dict[str, int] = {}
    total = 0
    for name, spec in names.items():
        if fragment_of(local, spec) == fragment:
            first[name] = total
            total += rows_of(spec) * blocks_between(local.outer_block, 0, spec.shape[-1])
    return FragmentBlocks(first=first, total=total)


def rows_of(spec: ParameterSpec) -> int:
    """Return the rows of a parameter; a vector is one."""
    assert len(spec.shape) in (1, 2), f"{spec.name} is neither a vector nor a matrix"
    return spec.shape[0] if len(spec.shape) == 2 else 1


def blocks_between(block: int, start: int, stop: int) -> int:
    """Return how many blocks columns `start` to `stop` - 1 of a row lie in."""
    return (stop - 1) // block - start // block + 1 if stop > start else 0


def sent_of_slices(plan: Plan, rank: int, fragment: int) -> Iterator[tuple[int, int]]:
    """Yield the codes and the scales that `rank` sends of each bucket with part of a fragment.

    A block of which a rank has two parts in different rows of its slice is impossible; one that
    begins in the middle of a row has a scale of its own on each rank that has some of it.
    """
    inner, place = plan_and_rank(plan, rank)
    local, part = plan.mathematics.local_sgd, part_of(inner, place)
    specs = {spec.name: spec for spec in held_parameters(inner, part)}
    tensor = inner.mesh.coordinates(place)[Axis.TP]
    for bucket in plan_buckets(inner, part):
        size = slice_elements(inner, bucket)
        begin = slice_index(inner, place, expert=bucket.expert) * size
        codes = scales = 0
        for slot in slot_ranges(inner, bucket, specs):
            if fragment_of(local, slot.spec) != fragment:
                continue
            pieces = pieces_of(inner, slot.spec)
            column, width, real = _local_piece(slot.spec, pieces, tensor if pieces > 1 else 0)
            start = max(slot.start, begin) - slot.start
            stop = min(slot.start + real, begin + size) - slot.start
            if stop > start:
                codes += stop - start
                scales += _scales_of_range(local.outer_block, column, width, start, stop)
        if codes:
            yield codes, scales


def _local_piece(spec: ParameterSpec, pieces: int, index: int) -> tuple[int, int, int]:
    """Return the first column of a tensor rank's piece, its width, and its elements, no padding."""
    rows, column, width = rows_of(spec), 0, spec.shape[-1]
    if spec.split_dim is not None:
        first, last = spec.local_range(pieces, index)
        if spec.split_dim == len(spec.shape) - 1:
            column, width = first, last - first
        else:
            rows = last - first
    return column, width, rows * width


def _scales_of_range(block: int, column: int, width: int, start: int, stop: int) -> int:
    """Return the scales of elements `start` to `stop` - 1 of rows of `width` from `column` on."""
    (first, begin), (last, end) = divmod(start, width), divmod(stop - 1, width)
    if first == last:
        return blocks_between(block, column + begin, column + end + 1)
    whole = (last - first - 1) * blocks_between(block, column, column + width)
    head = blocks_between(block, column + begin, column + width)
    return head + whole + blocks_between(block, column, column + end + 1)
