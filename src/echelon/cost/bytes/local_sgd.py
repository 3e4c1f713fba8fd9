# SPDX-License-Identifier: Apache-2.0
"""Bytes of local SGD: what islands send each other, and what a rank holds to agree with them.

With I islands, n elements of a fragment in the slices of a rank (all fragments together are the
slices, padding left out), s bytes of an element of masters and H steps a round:

    sent for the outer step of a fragment          2 (I-1)/I n s      over dp_replicate
    sent in a mean step                           the same of all fragments, / H
    held                                          S s outer parameters, S s momentum (nesterov),
                                                  S s outer gradients (with a delay)

Codes of 8 bits are gathered, of which each rank sends (I-1) (n + s b): 1 byte of each, and a scale
for each of the b blocks of `layout/islands.py` that its slices touch; for more than 7 islands
that is no less than sums in float32. Inside of an island the B blocks of a stage take 2 (n-1)/n B s
for their largest numbers, over its n ranks.

S are the elements of slices, padding included. Gradients that are summed in each step are as many,
so what crosses islands is 1/H of what replicas send (ZeRO 1 to 3; at stage 0 their ring is one with
those inside). At the end of a round each rank tells its peers whether somebody asks to stop.

Of islands that may be lost k meet, and (k-1)/k takes the place of (I-1)/I; they sum by the backend,
and what else they tell each other goes through the launcher's store. One that comes back is sent
S s outer parameters and S s momentum by the first of those that met.

Source: Stich, 2018; Douillard et al., "DiLoCo", 2023, and "Streaming DiLoCo", 2025.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.core.axis import Axis
from echelon.core.choices.collective_algorithms import BACKEND
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.all_reduce import SumGroup, sum_group
from echelon.cost.bytes.data import STAGE_AXIS
from echelon.cost.bytes.terms import (
    WIDE_BYTES,
    HeldTerm,
    SentTerm,
    all_gather_bytes,
    all_reduce_bytes,
)
from echelon.layout.buckets import plan_buckets, slice_elements
from echelon.layout.islands import blocks_in_stage, plan_and_rank, sent_of_slices, slice_fragments
from echelon.layout.muon import STAGE_AXES
from echelon.layout.stage import part_of

ROUND_ROW_BYTES = 8
"""What a rank tells its peers at the end of a round: how many of its island ask to stop."""

OUTER_PARAMETERS, OUTER_MOMENTUM, OUTER_GRADIENTS = (
    "outer parameters",
    "outer momentum",
    "outer gradients",
)
"""Names of terms of what is held."""

_SOURCE = "Douillard et al., DiLoCo, 2023, algorithm 1"
_IN_FLIGHT = 2
"""Buckets whose outer gradients are summed at a time, without delay."""


def outer_bytes(
    plan: Plan, rank: int, step: int, *, present: int | None = None
) -> tuple[SentTerm, ...]:
    """Return the terms of what `rank` sends to other islands, told at the end of `step` (from 0).

    A message is told when it is awaited: what comes late, with the outer step that is made of it.
    Of islands that may be lost so many are `present`, or all.
    """
    local = plan.mathematics.local_sgd
    met = _met(plan, rank, local.changes_after(step), present=present)
    found = [*met, *_row(plan, local.ends_round(step))]
    return tuple(term for term in found if term.bytes)


def rejoin_bytes(plan: Plan, rank: int) -> int:
    """Return what a rank of the first island that met sends to one that comes back."""
    kinds = 1 + (plan.mathematics.local_sgd.outer == "nesterov")
    return kinds * sum(_slices(plan, rank)) * element_bytes(plan)


def mean_outer_bytes(plan: Plan, rank: int) -> tuple[SentTerm, ...]:
    """Return the terms of a mean step: a round of all fragments comes once in H steps."""
    local = plan.mathematics.local_sgd
    if not local.active:
        return ()
    every = range(local.fragments)
    found = [*_met(plan, rank, every, local.every), *_row(plan, True, local.every)]
    return tuple(term for term in found if term.each)


def outer_held(plan: Plan, rank: int) -> tuple[HeldTerm, ...]:
    """Return the outer state that `rank` holds on its device between steps."""
    local = plan.mathematics.local_sgd
    if not local.active:
        return ()
    names = [OUTER_PARAMETERS]
    names += [OUTER_MOMENTUM] * (local.outer == "nesterov")
    names += [OUTER_GRADIENTS] * (local.delay > 0)
    elements, size = sum(_slices(plan, rank)), element_bytes(plan)
    formula = f"{elements:,} x {size}"
    return tuple(HeldTerm(name=name, bytes=elements * size, formula=formula) for name in names)


def outer_step_bytes(plan: Plan, rank: int) -> int:
    """Return what the outer steps at the end of a step have beside what is held, at most."""
    local = plan.mathematics.local_sgd
    if not local.active or local.delay:
        return 0
    sizes = _slices(plan, rank)
    if local.is_elastic:
        # All sums of a meeting are there before any is applied.
        met = [_run_lengths(plan, rank, [fragment]) for fragment in range(local.fragments)]
        return max(map(sum, met)) * element_bytes(plan)
    if local.quantised:
        # Differences of all buckets, and of the largest one codes of all islands and numbers.
        each = element_bytes(plan)
        return sum(sizes) * each + max(sizes, default=0) * (local.islands + 1 + 2 * each)
    pairs = [sum(sizes[at : at + _IN_FLIGHT]) for at in range(len(sizes))]
    return max(pairs, default=0) * element_bytes(plan)


def element_bytes(plan: Plan) -> int:
    """Return s: the bytes of an element of outer state and of outer gradients."""
    return max(WIDE_BYTES, DTYPE_BYTES[plan.mathematics.precision.master])


def sent_element_bytes(plan: Plan) -> float:
    """Return the bytes that an outer gradient takes of a weight, as it travels."""
    local = plan.mathematics.local_sgd
    if not local.quantised:
        return float(element_bytes(plan))
    return 1.0 + element_bytes(plan) / local.outer_block


def _met(
    plan: Plan, rank: int, fragments: Sequence[int], every: int = 1, *, present: int | None = None
) -> Iterator[SentTerm]:
    if plan.mathematics.local_sgd.quantised:
        yield from _met_in_codes(plan, rank, fragments, every)
        return
    sums, size = _sums(plan, rank, present), element_bytes(plan)
    yield SentTerm(
        axis=Axis.DP_REPLICATE.value,
        name="outer gradients",
        each=sum(sums.bytes(n, size) for n in _run_lengths(plan, rank, fragments)),
        every=every,
        formula="2 (I-1)/I x slices x s, once in H steps",
        source=_SOURCE,
    )


def _met_in_codes(
    plan: Plan, rank: int, fragments: Sequence[int], every: int
) -> Iterator[SentTerm]:
    islands, size = plan.mathematics.local_sgd.islands, element_bytes(plan)
    inner, _ = plan_and_rank(plan, rank)
    sent = [one for fragment in fragments for one in sent_of_slices(plan, rank, fragment)]
    source = "Douillard et al., Streaming DiLoCo, 2025, section 2.4"
    for name, numbers, each in (
        ("codes of outer gradients", sum(codes for codes, _ in sent), 1),
        ("scales of outer gradients", sum(scales for _, scales in sent), size),
    ):
        yield SentTerm(
            axis=Axis.DP_REPLICATE.value,
            name=name,
            each=all_gather_bytes(numbers * each, islands),
            every=every,
            formula=f"(I-1) x {each} for each, once in H steps",
            source=source,
        )
    stage = inner.mesh.degree(*STAGE_AXES)
    blocks = [blocks_in_stage(plan, rank, fragment).total for fragment in fragments]
    yield SentTerm(
        axis=STAGE_AXIS,
        name="largest of outer blocks",
        each=sum(all_reduce_bytes(count * size, stage) for count in blocks),
        every=every,
        formula="2 (n-1)/n x blocks x s, once in H steps",
        source=source,
    )


def _row(plan: Plan, ends: bool, every: int = 1) -> Iterator[SentTerm]:
    if plan.mathematics.local_sgd.is_elastic:
        return
    yield SentTerm(
        axis=Axis.DP_REPLICATE.value,
        name="round row",
        each=all_gather_bytes(ROUND_ROW_BYTES * ends, plan.mathematics.local_sgd.islands),
        every=every,
        formula=f"(I-1) x {ROUND_ROW_BYTES}, once in H steps",
        source="islands stop together, at the end of a round",
    )


def _sums(plan: Plan, rank: int, present: int | None = None) -> SumGroup:
    every = plan.mesh.group(rank, Axis.DP_REPLICATE)
    found = sum_group(plan, every, rank)
    if not plan.mathematics.local_sgd.is_elastic:
        return found
    count = len(every) if present is None else present
    place = min(found.place, count - 1)
    return SumGroup(algorithm=BACKEND, place=place, nodes=found.nodes[:count])


def _run_lengths(plan: Plan, rank: int, fragments: Sequence[int]) -> list[int]:
    """Return the elements of each run of some fragments in the slices of a rank."""
    if not fragments:
        return []
    found = slice_fragments(plan, rank)
    return [len(run) for runs in found for fragment in fragments for run in runs[fragment]]


def _slices(plan: Plan, rank: int) -> list[int]:
    """Return the elements of the slice of each bucket of a rank."""
    inner, place = plan_and_rank(plan, rank)
    return [slice_elements(inner, one) for one in plan_buckets(inner, part_of(inner, place))]
