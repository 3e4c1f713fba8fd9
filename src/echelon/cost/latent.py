"""Bytes that latent attention sends over tensor ranks: equal to what the run records.

N tokens are a microbatch on a rank of context, D the hidden width, r all narrow widths together
(query_rank + kv_rank + rope_dim), u those that a layer leads up from (query_rank + kv_rank), `s`
the bytes of an element, `n` the degree `tp`. Projections down are whole on every rank, so nothing
of width D is sent before the heads, and per block and microbatch

    without sequence parallelism   forward   nothing
                                   backward  2 (n-1)/n N r s   gradients, summed
    with sequence parallelism      forward   (n-1)/n N r s     rows, gathered
                                   backward  the same, gradients scattered, and (n-1)/n N u s for
                                             rows gathered again for the gradients of weights

What stays at width D is one sum after the heads, and the two of a dense MLP.
"""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.axis import Axis
from echelon.core.model_shape import LatentAttention
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.collectives import all_gather_bytes, all_reduce_bytes, reduce_scatter_bytes
from echelon.cost.terms import SentTerm

_SOURCE = "DeepSeek-V2, 2024, section 2.1, split by heads"


def wide_before_heads(plan: Plan) -> tuple[int, int]:
    """Return how many collectives of [N, D] attention has before its heads: forward, backward.

    Grouped-query attention gathers the stream (or sums its gradient), latent attention does not.
    """
    if plan.model.latent is not None:
        return 0, 0
    return (1, 2) if plan.layout.sequence_parallel else (0, 1)


def latent_bytes(plan: Plan, blocks: int, again: int) -> Iterator[SentTerm]:
    """Yield the terms of the axis "tp" for `blocks` runs of a block, `again` of them repeated."""
    latent, scattered = plan.model.latent, plan.layout.sequence_parallel
    if latent is None:
        return
    forward = _gathered(plan, narrow_widths(latent)) if scattered else 0
    if scattered:
        backward = forward + _gathered(plan, narrow_widths(latent)[:2])
        formulas = "(n-1)/n N r s", "(n-1)/n N (r + u) s"
    else:
        backward = sum(
            all_reduce_bytes(_rows_bytes(plan, width), plan.mesh.tp)
            for width in narrow_widths(latent)
        )
        formulas = "0", "2 (n-1)/n N r s"
    for name, count, each, formula in (
        ("latent vectors forward", blocks, forward, formulas[0]),
        ("latent vectors forward again", again, forward, formulas[0]),
        ("latent vectors backward", blocks, backward, formulas[1]),
    ):
        yield SentTerm(
            axis=Axis.TP.value, name=name, count=count, each=each, formula=formula, source=_SOURCE
        )


def narrow_widths(latent: LatentAttention) -> tuple[int, int, int]:
    """Return the widths that heads come out of: of queries, of keys with values, and shared."""
    return latent.query_rank, latent.kv_rank, latent.rope_dim


def _gathered(plan: Plan, widths: tuple[int, ...]) -> int:
    """Return the bytes of gathering rows of these widths, or of scattering their gradients."""
    degree, total = plan.mesh.tp, 0
    for width in widths:
        piece = _rows_bytes(plan, width) // degree
        assert all_gather_bytes(piece, degree) == reduce_scatter_bytes(piece, degree)
        total += all_gather_bytes(piece, degree)
    return total


def _rows_bytes(plan: Plan, width: int) -> int:
    return plan.local_tokens * width * DTYPE_BYTES[plan.mathematics.precision.parameters]
