# SPDX-License-Identifier: Apache-2.0
"""Bytes of matrices of 8-bit numbers: a code for each number, a scale for each tile.

A code takes 1 byte. A scale takes 4, of the `block` numbers of a row that share it; of a weight
block x block numbers do. A scale of a whole tensor is known on every rank: it is not kept beside
codes, nor sent with them. In their place, at the end of a step, all ranks find the largest numbers
of the model in one all-reduce: three of each group of layers.
"""

from __future__ import annotations

from dataclasses import replace

from echelon.core.plan import DTYPE_BYTES, Plan, Precision
from echelon.layout.buckets import BucketPlan, slice_elements
from echelon.layout.fp8_groups import fp8_groups

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

_LEAST_MAXIMUM_BYTES = 4
"""The largest number is told in at least fp32."""


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


def largest_number_bytes(precision: Precision) -> int:
    """Return the bytes of the largest number of a square, as ranks tell each other of it."""
    return max(_LEAST_MAXIMUM_BYTES, DTYPE_BYTES[precision.parameters])


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
