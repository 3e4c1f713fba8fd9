# SPDX-License-Identifier: Apache-2.0
"""Bytes that each rank holds between steps, by kind and pool: equal to what the run holds.

Parameters, gradients, master copies and optimizer state are exact, padding of buckets and of the
vocabulary included and told. In mixed precision with Adam they are the 2 + 2 + 12 bytes a weight of
the ZeRO paper (Rajbhandari et al., 2020, section 3.1), each whole or a slice of 1/N as the stage
says: 16 psi, 4 psi + 12 psi/N, 2 psi + 14 psi/N, 16 psi/N (`cost/bytes/model_sizes.py`).

Not counted: a few numbers for each layer or bucket, such as the biases and the last shares of the
experts of a router (2 E of them).

What exists only while a step runs is bounded by `cost/bytes/transient.py`.

`zero_choices` puts what a plan decided about ZeRO beside what it did not choose: bytes sent against
bytes held.

Bytes that a run writes (`stored_bytes`) do not depend on the layout: a checkpoint holds each
element of each tensor once, without padding, in the dtypes that ranks keep. Trained weights take
the values that the optimizer updates and its state of each (12 bytes with AdamW in fp32); frozen
ones take the dtype of parameters, once in a run. Headers and indexes come on top, and the numbers
of routers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from echelon.core.axis import LOSS_AXES, Axis
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.parameters import parameters
from echelon.core.plan import (
    DTYPE_BYTES,
    Accumulation,
    DType,
    Mathematics,
    OffloadTarget,
    Plan,
    Zero,
)
from echelon.cost.bytes.data import data_bytes
from echelon.cost.bytes.local_sgd import outer_held
from echelon.cost.bytes.quantised import CODE_BYTES, SCALE_BYTES, gathered_element_bytes
from echelon.cost.bytes.servers import held_by_server
from echelon.cost.bytes.terms import HeldTerm, Pool
from echelon.cost.bytes.transient import transient_terms
from echelon.layout.buckets import (
    BucketPlan,
    accumulates_slices,
    plan_buckets,
    slice_elements,
    slice_index,
)
from echelon.layout.data_groups import secondary_elements
from echelon.layout.islands import inner_plan, plan_and_rank
from echelon.layout.slots import SlotRange, slot_ranges
from echelon.layout.stage import held_parameters, pieces_of, pp_rank_of, rank_part, update_rule_of

POOLS: dict[OffloadTarget, Pool] = {"none": "device", "host": "host", "nvme": "nvme"}
"""Where slices rest, for each word of a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBucket:
    """Hold a bucket with what is known of its padding: its end, and in padded parameters."""

    plan: BucketPlan
    real_stop: int
    padded: tuple[SlotRange, ...]


def bytes_held(plan: Plan, rank: int) -> tuple[HeldTerm, ...]:
    """Return the model state of `rank` by kind and pool; kinds that it has none of are left out."""
    if plan.mesh.is_server(rank):
        return held_by_server(plan, rank)
    return held_terms(plan, held_buckets(plan, pp_rank_of(*plan_and_rank(plan, rank))), rank)


def bytes_held_by_pool(plan: Plan, rank: int) -> dict[Pool, int]:
    """Return the bytes of model state that `rank` holds in each pool that it uses."""
    total: dict[Pool, int] = {}
    for term in bytes_held(plan, rank):
        total[term.pool] = total.get(term.pool, 0) + term.bytes
    return total


def held_buckets(plan: Plan, pp_rank: int) -> tuple[HeldBucket, ...]:
    """Return the buckets of a pipeline rank; the same for all that share its place."""
    plan = inner_plan(plan)
    part = rank_part(plan, pp_rank)
    specs = {spec.name: spec for spec in held_parameters(plan, part)}
    found: list[HeldBucket] = []
    for bucket in plan_buckets(plan, part):
        here = [specs[name] for name in bucket.names]
        padded: tuple[SlotRange, ...] = ()
        if any(spec.padded for spec in here):
            slots = slot_ranges(plan, bucket, specs)
            padded = tuple(slot for slot in slots if slot.spec.padded)
        real = sum(spec.local_numel(pieces_of(plan, spec)) for spec in here)
        found.append(HeldBucket(plan=bucket, real_stop=real, padded=padded))
    return tuple(found)


def held_terms(plan: Plan, buckets: Sequence[HeldBucket], rank: int) -> tuple[HeldTerm, ...]:
    """Return the model state of `rank`, which has `buckets`, by kind and pool."""
    outer = outer_held(plan, rank)
    plan, rank = plan_and_rank(plan, rank)
    precision, zero = plan.mathematics.precision, plan.layout.zero
    index = {expert: slice_index(plan, rank, expert=expert) for expert in (False, True)}
    found: dict[tuple[str, Pool], tuple[DType, list[_Piece]]] = {}

    def elements(bucket: BucketPlan, whole: bool) -> range:
        if whole:
            return range(bucket.num_elements)
        size = slice_elements(plan, bucket)
        return range(index[bucket.expert] * size, (index[bucket.expert] + 1) * size)

    def add(
        name: str, dtype: DType, kept: Sequence[HeldBucket], pool: Pool, *, whole: bool = False
    ) -> None:
        if kept:
            _, pieces = found.setdefault((name, pool), (dtype, []))
            pieces += [(bucket, elements(bucket.plan, whole)) for bucket in kept]

    def sliced(wanted: bool) -> list[HeldBucket]:
        return [bucket for bucket in buckets if bucket.plan.sliced is wanted]

    add("parameters", precision.parameters, sliced(False), "device", whole=True)
    add("parameters", precision.parameters, sliced(True), POOLS[zero.parameter_offload])
    trained = [bucket for bucket in buckets if not bucket.plan.frozen]
    for expert in (False, True):
        alike = [bucket for bucket in trained if bucket.plan.expert is expert]
        whole = not accumulates_slices(plan, expert=expert)
        add("gradients", precision.gradients, alike, "device", whole=whole)
    pool = POOLS[zero.optimizer_offload]
    updated = () if plan.mesh.servers else trained
    if precision.has_master:
        add("master parameters", precision.master, updated, pool)
    add("optimizer state", precision.master, updated, pool)
    terms = tuple(
        _held_term(plan, rank, name, pool, DTYPE_BYTES[dtype], pieces)
        for (name, pool), (dtype, pieces) in found.items()
    )
    return (*terms, *_codes(plan, buckets), *_secondary(plan, buckets), *outer)


def _codes(plan: Plan, buckets: Sequence[HeldBucket]) -> Iterator[HeldTerm]:
    """Yield the codes of the slices that are gathered in 8 bits, and the scales of the whole."""
    coded = [bucket.plan for bucket in buckets if bucket.plan.fp8_squares]
    codes = sum(slice_elements(plan, bucket) for bucket in coded)
    squares = sum(bucket.fp8_squares for bucket in coded)
    if coded:
        yield HeldTerm(
            name="codes of parameters",
            bytes=codes * CODE_BYTES + squares * SCALE_BYTES,
            formula=f"{codes:,} x {CODE_BYTES} + {squares:,} x {SCALE_BYTES}",
        )


def _secondary(plan: Plan, buckets: Sequence[HeldBucket]) -> Iterator[HeldTerm]:
    """Yield the secondary slices, in what is gathered: parameters, or codes of 1 byte."""
    elements: dict[int, int] = {}
    for bucket in (one.plan for one in buckets):
        size = gathered_element_bytes(plan, bucket)
        elements[size] = elements.get(size, 0) + secondary_elements(plan, bucket)
    kept = [(count, size) for size, count in sorted(elements.items()) if count]
    if kept:
        yield HeldTerm(
            name="secondary slices",
            bytes=sum(count * size for count, size in kept),
            formula=" + ".join(f"{count:,} x {size}" for count, size in kept),
        )


_Piece = tuple[HeldBucket, range]
"""A bucket, and what is held of it."""


def _held_term(
    plan: Plan, rank: int, name: str, pool: Pool, size: int, pieces: Sequence[_Piece]
) -> HeldTerm:
    """Return one kind in one pool; a common number of tensors stands before the elements."""
    elements = padding = 0
    counts: set[int] = set()
    for bucket, held in pieces:
        states = OPTIMIZERS[bucket.plan.update].state
        count = len(states) if name == "optimizer state" else 1
        counts.add(count)
        elements += count * len(held)
        padding += count * _padding(plan, rank, bucket, held)
    times = f"{min(counts)} x " if len(counts) == 1 and counts != {1} else ""
    shown = elements // min(counts) if times else elements
    return HeldTerm(
        name=name,
        pool=pool,
        bytes=elements * size,
        padding=padding * size,
        formula=f"{times}{shown:,} x {size}",
    )


def _padding(plan: Plan, rank: int, bucket: HeldBucket, held: range) -> int:
    """Return the elements of a part of a bucket that are padding on `rank`."""
    holes = [(bucket.real_stop, bucket.plan.num_elements)]
    for slot in bucket.padded:
        first, last = slot.spec.local_range(plan.mesh.tp, plan.mesh.coordinates(rank)[Axis.TP])
        holes.append((slot.start + (last - first) * slot.spec.shape[1], slot.stop))
    return sum(max(0, min(held.stop, end) - max(held.start, begin)) for begin, end in holes)


ACCUMULATIONS: tuple[Accumulation, ...] = ("whole", "slices")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroChoice:
    """Say what one value of a setting costs each rank of a pipeline rank.

    `sent_bytes` go over the data axes per step; `held_bytes` rest on the device between steps, and
    at most `step_bytes` come on top while one runs.
    """

    setting: str
    value: str
    chosen: bool
    sent_bytes: int
    held_bytes: int
    step_bytes: int


def zero_choices(plan: Plan, pp_rank: int) -> tuple[ZeroChoice, ...]:
    """Return the values of each setting that trades bytes sent for bytes held, the chosen one too.

    Where gradients add up (ZeRO stages 1 to 3), and whether parameters are freed between forward
    and backward (stage 3).
    """
    zero = plan.layout.zero
    choices = [("zero.accumulate", one, replace(zero, accumulate=one)) for one in ACCUMULATIONS]
    if zero.stage == 3:
        for word, reshard in (("always", True), ("never", False)):
            other = replace(zero, reshard_after_forward=reshard)
            choices.append(("zero.reshard_after_forward", word, other))
    return tuple(_choice(plan, pp_rank, *one) for one in choices) if zero.stage else ()


def _choice(plan: Plan, pp_rank: int, setting: str, value: str, zero: Zero) -> ZeroChoice:
    other = replace(plan, layout=replace(plan.layout, zero=zero))
    rank = plan.mesh.rank({Axis.PP: pp_rank})
    held = held_terms(other, held_buckets(other, pp_rank), rank)
    step = transient_terms(other, pp_rank)
    part, alone = rank_part(other, pp_rank), plan.mesh.degree(*LOSS_AXES) == 1
    sent = () if alone else data_bytes(other, part, plan_buckets(other, part))
    return ZeroChoice(
        setting=setting,
        value=value,
        chosen=zero == plan.layout.zero,
        sent_bytes=sum(term.bytes for term in sent),
        held_bytes=sum(term.bytes for term in held if term.pool == "device"),
        step_bytes=sum(term.bytes for term in step if term.pool == "device"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBytes:
    """Give the bytes of tensors that a run writes."""

    trained: int
    """Of a checkpoint: values that the optimizer updates."""
    optimizer: int
    """Of a checkpoint: what the optimizer keeps of them."""
    base: int
    """Once in a run: weights that never change."""

    @property
    def checkpoint(self) -> int:
        """Return the bytes of a checkpoint, without the base that it stands on."""
        return self.trained + self.optimizer


def stored_bytes(numbers: Mathematics) -> StoredBytes:
    """Return what a run with this mathematics writes."""
    precision = numbers.precision
    trained = optimizer = base = 0
    for spec in parameters(numbers.model):
        if spec.frozen:
            base += spec.numel * DTYPE_BYTES[precision.parameters]
            continue
        kinds = len(OPTIMIZERS[update_rule_of(numbers.optimizer, spec)].state)
        trained += spec.numel * DTYPE_BYTES[precision.master]
        optimizer += spec.numel * DTYPE_BYTES[precision.master] * kinds
    return StoredBytes(trained=trained, optimizer=optimizer, base=base)
