"""Bytes of matrices of 8-bit numbers: a code for each number, a scale for each tile.

A code takes 1 byte. A scale takes 4, of the `block` numbers of a row that share it; of a weight
block x block numbers do.
"""

from __future__ import annotations

from echelon.core.plan import DTYPE_BYTES, Plan, Precision
from echelon.layout.buckets import BucketPlan

CODE_BYTES = 1
SCALE_BYTES = 4


def fp8_scale_bytes(numbers: int, precision: Precision) -> int:
    """Return the bytes of the scales of so many numbers of rows."""
    return numbers // precision.fp8_block * SCALE_BYTES


def fp8_row_bytes(numbers: int, precision: Precision) -> int:
    """Return the bytes of so many numbers of rows: codes and scales."""
    return numbers * CODE_BYTES + fp8_scale_bytes(numbers, precision)


def gathered_element_bytes(plan: Plan, bucket: BucketPlan) -> int:
    """Return the bytes of a number of a bucket as it is gathered, and held while it is whole."""
    return CODE_BYTES if bucket.fp8_squares else DTYPE_BYTES[plan.mathematics.precision.parameters]


def largest_number_bytes(precision: Precision) -> int:
    """Return the bytes of the largest number of a square, as ranks tell each other of it."""
    return max(SCALE_BYTES, DTYPE_BYTES[precision.parameters])
