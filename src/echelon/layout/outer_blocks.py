# SPDX-License-Identifier: Apache-2.0
"""Blocks of outer gradients that share a scale in 8 bits: cut by the model, and by no layout.

A block is `OUTER_BLOCK` consecutive numbers of a row of a parameter, the last one of a row what is
left; a vector is one row. Ranks of an island that hold pieces of a block find its largest number
together, so the same numbers have the same codes whoever holds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from echelon.core.axis import Axis
from echelon.core.choices.local_sgd import OUTER_BLOCK
from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Plan
from echelon.layout.buckets import plan_buckets, slice_elements, slice_index
from echelon.layout.islands import fragment_of, plan_and_rank
from echelon.layout.slots import slot_ranges
from echelon.layout.stage import (
    held_parameters,
    part_of,
    pieces_of,
    pp_rank_of,
    rank_part,
    stage_parameters,
)


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
            total += rows_of(spec) * blocks_between(0, spec.shape[-1])
    return FragmentBlocks(first=first, total=total)


def rows_of(spec: ParameterSpec) -> int:
    """Return the rows of a parameter; a vector is one."""
    assert len(spec.shape) in (1, 2), f"{spec.name} is neither a vector nor a matrix"
    return spec.shape[0] if len(spec.shape) == 2 else 1


def blocks_between(start: int, stop: int) -> int:
    """Return how many blocks columns `start` to `stop` - 1 of a row lie in."""
    return (stop - 1) // OUTER_BLOCK - start // OUTER_BLOCK + 1 if stop > start else 0


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
                scales += _scales_of_range(column, width, start, stop)
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


def _scales_of_range(column: int, width: int, start: int, stop: int) -> int:
    """Return the scales of elements `start` to `stop` - 1 of rows of `width` from `column` on."""
    (first, begin), (last, end) = divmod(start, width), divmod(stop - 1, width)
    if first == last:
        return blocks_between(column + begin, column + end + 1)
    whole = (last - first - 1) * blocks_between(column, column + width)
    head = blocks_between(column + begin, column + width)
    return head + whole + blocks_between(column, column + end + 1)
