# SPDX-License-Identifier: Apache-2.0
"""Bytes of numbers held or sent as codes: fp8 products, int8 gathers, sums of integers.

A code of a matrix in 8 bits takes 1 byte. A scale takes 4, of the `block` numbers of a row that
share it; of a weight block x block numbers do. A scale of a whole tensor is known on every rank: it
is not kept beside codes, nor sent with them. In their place, at the end of a step, all ranks find
the largest numbers of the model in one all-reduce: three of each group of layers.

Gradients that are summed in two hops of integers (`zero.reduce`): a bucket of E numbers is summed
over l ranks of each of k nodes; a slice is S = E / (k l) numbers, ceil(S / 128) blocks of codes
with a scale each:

    m(S)    = blocks x (4 + 128 bits / 8)        8 in place of 4 where sums are in float64
    inside  (l - 1) k m(S)
    across  (k - 1) m(S)

Source: Wang et al., "ZeRO++", 2023, section 3.3 (qgZ). What a slice is rounded to is at most half a
scale away: the largest number of its block over 2 x 127, or 2 x 7 (`parallel/transport/
quantised_sums.py` adds that up).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from echelon.core.plan import DTYPE_BYTES, Plan, Precision, ReduceKind
from echelon.cost.bytes.terms import WIDE_BYTES, SentTerm
from echelon.layout.buckets import BucketPlan, fp8_groups, slice_elements
from echelon.layout.data_groups import hop_degrees

CODE_BYTES = 1
SCALE_BYTES = 4


def fp8_scale_bytes(numbers: int, precision: Precision) -> int:
    """Return the bytes of the scales of so many numbers of rows."""
    if precision.has_tensor_scales:
        return 0
    return numbers // precision.fp8_block * SCALE_BYTES


def fp8_row_bytes(numbers: int, precision: Precision) -> int:
    """Return the bytes of so many numbers of rows: codes and scales."""
    return numbers * CODE_BYTES + fp8_scale_bytes(numbers, precision)


_KERNEL_BLOCK = 128
"""Numbers that share a scale in a GPU's kernel (`parallel/kernels/fp8.py`)."""


def widened_element_bytes(precision: Precision, *, on_gpu: bool) -> int:
    """Return the bytes of what a product widens 8-bit numbers to; 0 where a kernel takes codes."""
    if not precision.is_fp8:
        return 0
    if on_gpu and precision.parameters != "fp64":
        if precision.has_tensor_scales or precision.fp8_block == _KERNEL_BLOCK:
            return 0
        if precision.parameters == "bf16":
            return DTYPE_BYTES["bf16"]
    return max(DTYPE_BYTES["fp32"], DTYPE_BYTES[precision.parameters])


MAXIMA_OF_A_GROUP = 3
"""Largest numbers of a group of layers: of inputs, of gradients of outputs, of weights."""


def gathered_element_bytes(plan: Plan, bucket: BucketPlan) -> int:
    """Return the bytes of a number of a bucket as it is held while it is whole."""
    return CODE_BYTES if bucket.fp8_squares else DTYPE_BYTES[plan.mathematics.precision.parameters]


def gathered_piece_bytes(plan: Plan, bucket: BucketPlan) -> int:
    """Return the bytes of what a rank puts into a gather of a bucket.

    In int8 these are codes of 1 byte, and scales in at least fp32.
    """
    elements = slice_elements(plan, bucket)
    if not bucket.int8_blocks:
        return elements * gathered_element_bytes(plan, bucket)
    scales = elements // plan.mathematics.precision.int8_block
    return elements * CODE_BYTES + scales * largest_number_bytes(plan.mathematics.precision)


def int8_message_bytes(plan: Plan, bucket: BucketPlan) -> int:
    """Return the bytes of the pieces of all ranks, which are there until values are made of them;
    0 of what is not gathered in int8."""
    size = largest_number_bytes(plan.mathematics.precision)
    codes = bucket.num_elements * CODE_BYTES if bucket.int8_blocks else 0
    return codes + bucket.int8_blocks * size


def int8_encoding_bytes(plan: Plan, bucket: BucketPlan) -> int:
    """Additional bytes to encode a slice: its numbers twice, scales, codes and the piece.

    0 without gathers in int8.
    """
    if not bucket.int8_blocks:
        return 0
    size, numbers = largest_number_bytes(plan.mathematics.precision), slice_elements(plan, bucket)
    scales = 3 * size * bucket.int8_blocks * numbers // bucket.num_elements
    return 2 * numbers * (size + CODE_BYTES) + scales


def largest_number_bytes(precision: Precision) -> int:
    """Return the bytes of the largest number of a square, as ranks tell each other of it."""
    return max(WIDE_BYTES, DTYPE_BYTES[precision.parameters])


def fp8_maxima_bytes(plan: Plan) -> int:
    """Return the bytes of the largest numbers of a step, which scales of whole tensors come from.

    0 where there are no such scales.
    """
    precision = plan.mathematics.precision
    if not precision.has_tensor_scales:
        return 0
    size = largest_number_bytes(precision)
    return MAXIMA_OF_A_GROUP * len(fp8_groups(plan.model)) * size


def first_step(plan: Plan) -> Plan:
    """Return the plan whose products are those of a run's first step, before there is a history."""
    if not plan.mathematics.precision.has_tensor_scales:
        return plan
    precision = replace(plan.mathematics.precision, fp8_scales="block")
    return replace(plan, mathematics=replace(plan.mathematics, precision=precision))


REDUCE_BLOCK = 128
"""Numbers of a slice that share a scale; the last block of a slice may be short."""

LARGEST_CODES: Mapping[ReduceKind, int] = {"int8": 127, "int4": 7}
"""The largest code of each kind."""

CODE_BITS: Mapping[ReduceKind, int] = {"int8": 8, "int4": 4}


def blocks_of_slice(count: int) -> int:
    """Return how many blocks so many numbers are."""
    return -(-count // REDUCE_BLOCK)


def message_bytes(count: int, kind: ReduceKind, scale_bytes: int) -> int:
    """Return the bytes of a slice of `count` numbers as it is sent."""
    return blocks_of_slice(count) * (scale_bytes + REDUCE_BLOCK * CODE_BITS[kind] // 8)


def scale_bytes(precision: Precision) -> int:
    """Return the bytes of a scale."""
    return max(WIDE_BYTES, DTYPE_BYTES[precision.reduction])


def slice_message_bytes(plan: Plan, bucket: BucketPlan) -> int:
    """Return the bytes of one slice of a bucket as it is sent."""
    kind, size = plan.layout.zero.reduce, scale_bytes(plan.mathematics.precision)
    return message_bytes(slice_elements(plan, bucket), kind, size)


def quantised_sum_copies(plan: Plan, bucket: BucketPlan) -> int:
    """Return the bytes that a sum has beside it while it is under way: codes sent and received.

    0 where a bucket is summed exactly.
    """
    near, far = hop_degrees(plan, expert=bucket.expert)
    return 2 * near * far * slice_message_bytes(plan, bucket) if far > 1 else 0


def second_hop_copies(plan: Plan, bucket: BucketPlan) -> int:
    """Return the bytes that come on top while the second hop of a sum begins: sums of a place of
    the node, and their codes, sent and received."""
    _, far = hop_degrees(plan, expert=bucket.expert)
    if far == 1:
        return 0
    sums = far * slice_elements(plan, bucket) * scale_bytes(plan.mathematics.precision)
    return sums + 2 * far * slice_message_bytes(plan, bucket) + encoding_bytes(plan, bucket)


def second_hop_bytes(plan: Plan, bucket: BucketPlan) -> int:
    """Return the bytes of a second hop under way: codes sent and received, and the own sum.

    0 where a bucket is summed exactly.
    """
    _, far = hop_degrees(plan, expert=bucket.expert)
    if far == 1:
        return 0
    own = slice_elements(plan, bucket) * scale_bytes(plan.mathematics.precision)
    return 2 * far * slice_message_bytes(plan, bucket) + own


def ending_bytes(plan: Plan, bucket: BucketPlan) -> int:
    """Return the bytes that come on top while a second hop ends: scales, codes and numbers of a
    slice of another node, when the codes that were sent are gone. 0 where sums are exact."""
    _, far = hop_degrees(plan, expert=bucket.expert)
    blocks = blocks_of_slice(slice_elements(plan, bucket))
    decoded = blocks * (1 + 2 * REDUCE_BLOCK) * scale_bytes(plan.mathematics.precision)
    return max(0, decoded - far * slice_message_bytes(plan, bucket)) if far > 1 else 0


def encoding_bytes(plan: Plan, bucket: BucketPlan) -> int:
    """Return the bytes of the numbers of a place on all nodes while codes are made of them, twice:
    in blocks, and over their scales. 0 where a bucket is summed exactly."""
    _, far = hop_degrees(plan, expert=bucket.expert)
    numbers = far * blocks_of_slice(slice_elements(plan, bucket)) * REDUCE_BLOCK
    return 2 * numbers * scale_bytes(plan.mathematics.precision) if far > 1 else 0


def quantised_sum_terms(
    plan: Plan, buckets: Sequence[BucketPlan], rounds: Mapping[str, int], axes: tuple[str, str]
) -> Iterator[SentTerm]:
    """Yield both hops of buckets, by how often a step sums them; `axes` are inside and across."""
    for count in sorted({rounds[bucket.name] for bucket in buckets}):
        alike = [bucket for bucket in buckets if rounds[bucket.name] == count]
        near, far = hop_degrees(plan, expert=alike[0].expert)
        slices = sum(slice_message_bytes(plan, bucket) for bucket in alike)
        hops = (
            ("gradients, in nodes", axes[0], (near - 1) * far, "(l-1) k m(S)"),
            ("gradients, across nodes", axes[1], far - 1, "(k-1) m(S)"),
        )
        for name, axis, times, formula in hops:
            yield SentTerm(
                axis=axis,
                name=name,
                count=count,
                each=times * slices,
                far=times * slices if axis == axes[1] else 0,
                formula=formula,
                source="Wang et al., ZeRO++, 2023, section 3.3 (qgZ)",
            )
