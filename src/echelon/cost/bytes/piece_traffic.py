# SPDX-License-Identifier: Apache-2.0
"""What the pieces between products of a block move on a GPU, plain and as one kernel each.

Bytes are for each token, and width of `hidden` or of `ffn`, of 2-byte elements, as a rehearsal
counts them of a block of Llama 3 8B (`tests/rehearsal/work/block_work.toml`; a test compares). A
plain piece is PyTorch's operations one after the other, with what they write in fp32 in between; a
kernel reads and writes each tensor once. With norms of heads plain ones move more, a kernel the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray

from echelon.core.choices.kernels import FusedPiece, Kernels

Num: TypeAlias = "int | float | NDArray[Any]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTraffic:
    """Give what a piece of a block moves for each token and width, and its kernels forward."""

    forward: float
    backward: float
    kernels: float


PLAIN: Mapping[FusedPiece, PieceTraffic] = {
    "norm": PieceTraffic(forward=28.3, backward=80.3, kernels=12.0),
    "residual": PieceTraffic(forward=12.0, backward=12.0, kernels=2.0),
    "rotary": PieceTraffic(forward=18.2, backward=24.2, kernels=28.0),
    "swiglu": PieceTraffic(forward=10.0, backward=24.0, kernels=2.0),
    "loss": PieceTraffic(forward=30.5, backward=40.0, kernels=0.0),
}
"""Both norms, both sums, and so on; "swiglu" for each width of `ffn`, "loss" for each logit."""

FUSED: Mapping[FusedPiece, PieceTraffic] = {
    "norm": PieceTraffic(forward=8.0, backward=13.0, kernels=2.0),
    # Of four reads of the stream and its norms in two kernels one less, and of backward's sums all.
    "residual": PieceTraffic(forward=10.0, backward=4.0, kernels=1.0),
    "rotary": PieceTraffic(forward=5.1, backward=6.1, kernels=1.0),
    "swiglu": PieceTraffic(forward=6.0, backward=10.0, kernels=1.0),
    "loss": PieceTraffic(forward=2.0, backward=4.0, kernels=0.0),
}

HEAD_WIDTHS = 1.5
"""Queries, keys and values of Llama 3 8B over its `hidden`: what "rotary" counts, it counts of
these."""

_PRODUCTS = 5.0
"""Kernels of a block forward that are products or attention."""

_GATED = 1.5
"""`inner_bytes` counts half of gate, up and their product: 0.5 (1 + 2) widths of `ffn`."""


MOST_PARTIAL_SUMS = 512
"""Programs among which a kernel shares out the rows of a sum (`kernels/norm_swiglu_triton.py`):
several for each unit of a large GPU."""


def rows_of_partial_sum(num_rows: Num) -> Num:
    """Return the rows that one partial sum of a kernel is of, one at least."""
    return -(-num_rows // MOST_PARTIAL_SUMS) + 1 * (num_rows == 0)


def num_partial_sums(num_rows: Num) -> Num:
    """Return how many partial sums a kernel gives of so many rows."""
    return -(-num_rows // rows_of_partial_sum(num_rows))


def kernel_facts(kernels: Kernels) -> Mapping[str, float]:
    """Return the constants of our trainer on GPUs that its kernels decide, by their names."""
    found = {piece: (FUSED if piece in kernels.fused else PLAIN)[piece] for piece in PLAIN}
    loss, swiglu, rotary = found.pop("loss"), found.pop("swiglu"), found.pop("rotary")
    widths = found.values()
    width, width_back = sum(one.forward for one in widths), sum(one.backward for one in widths)
    return {
        "width_bytes": width,
        "width_passes": width_back / width,
        "head_bytes": rotary.forward / HEAD_WIDTHS,
        "head_passes": rotary.backward / rotary.forward,
        "inner_bytes": swiglu.forward / _GATED,
        "inner_passes": swiglu.backward / swiglu.forward,
        "logit_bytes": loss.forward + loss.backward,
        "kernels": _PRODUCTS + swiglu.kernels + rotary.kernels + sum(one.kernels for one in widths),
        "fused_loss": float("loss" in kernels.fused),
        "optimizer_bytes": 0.0,
        "casts_apart": float("update" not in kernels.fused),
    }
