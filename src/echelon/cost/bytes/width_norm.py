# SPDX-License-Identifier: Apache-2.0
"""Bytes that tensor ranks send for norms over all heads together, of which each has a part.

Of each token of a microbatch, per block (N tokens, n tensor ranks, s bytes of an element):

    forward    2 (n-1)/n 2 N max(4, s)   sums of squares of queries and of keys, one all-reduce
    backward   the same                  what pulls their gradients, an all-reduce for each

and forward once more where attention is made again in backward. It is no tensor of the width of the
model: with 4,096 wide heads in bf16 it is a thousandth of what a block sends for its layers.

Source: OLMo 2, 2024, section 2.2, split by heads (`parallel/kernels/width_norm.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.axis import Axis
from echelon.core.model_shape import ModelShape
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.all_reduce import sums_sent
from echelon.cost.bytes.terms import STATISTICS_BYTES, SentTerm, pass_terms
from echelon.layout.stage import RankPart


def normed_together(model: ModelShape) -> bool:
    """Return whether queries and keys are normed over all heads together."""
    return model.qk_norm and model.qk_norm_over == "width"


def width_norm_bytes(plan: Plan, part: RankPart, rank: int) -> Iterator[SentTerm]:
    """Yield the terms of norms over all heads together, two numbers of each token.

    Those of queries and of keys travel together forward, one after the other backward.
    """
    if not normed_together(plan.model):
        return
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    ranks, tokens = plan.mesh.group(rank, Axis.TP), plan.local_tokens
    size = max(STATISTICS_BYTES, size)
    redoes = plan.layout.recompute.redoes
    yield from pass_terms(
        Axis.TP,
        "norms of all heads",
        "OLMo 2, 2024, section 2.2, split by heads",
        counts=(
            sum(one.microbatches * len(one.blocks) for one in part.stages),
            sum(
                one.microbatches * sum(redoes("attention", block) for block in one.blocks)
                for one in part.stages
            ),
        ),
        each=(
            sums_sent(plan, ranks, rank, (2 * tokens,), size),
            sums_sent(plan, ranks, rank, (tokens, tokens), size),
        ),
        formulas=("2 (n-1)/n 2 N max(4, s)", "2 (n-1)/n 2 N max(4, s)"),
    )
