# SPDX-License-Identifier: Apache-2.0
"""What latent attention of a block keeps and works with (DeepSeek-V2, 2024, section 2.1).

In the letters of `cost/activations/numbers.py`; r_q and r_kv are the widths of the narrow vectors,
p and o those of the parts of a key that carry positions and that do not, v that of a value. Every
head has keys and values of its own (K = H), of the width of a query: h = o + p. What leads down is
whole on every tensor rank, for the rows that it holds; what leads up is split by heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.core.model_shape import LatentAttention
from echelon.cost.activations.attention import ATTENTION, attention_core_operator
from echelon.cost.activations.fp8_products import fp8_product_bytes
from echelon.cost.activations.linear import (
    ATTENTION_IN,
    ATTENTION_OUT,
    LATENT_DOWN,
    LATENT_KEYS,
    LATENT_QUERIES,
    ResidualBranch,
    norm_operator,
    row_parallel_operator,
    vector_gradient_bytes,
    weight_gradient_bytes,
)
from echelon.cost.activations.numbers import ActivationNumbers, Num, elementwise_max, is_positive
from echelon.cost.activations.operator_memory import OperatorMemory, saved_tensors

_DOWN, _SIDES = "q_down, kv_down", "heads"
_UP = {LATENT_QUERIES: "q_up", LATENT_KEYS: "kv_up"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Widths:
    """Give the bytes of what is between the narrow vectors and attention.

    `queries` and `pairs` are what comes out of the two projections up, `shared` the key part of all
    heads, `values` those without zeros behind them; `down` is all that leads down.
    """

    down: Num
    query_vector: Num
    key_vector: Num
    queries: Num
    pairs: Num
    shared: Num
    values: Num

    @classmethod
    def of(cls, x: ActivationNumbers, latent: LatentAttention) -> _Widths:
        here, whole = x.rows * x.size, x.tokens * x.size
        rank = latent.query_rank or 0
        return cls(
            down=here * (rank + latent.kv_rank + latent.rope_dim),
            query_vector=here * rank,
            key_vector=here * latent.kv_rank,
            queries=x.queries,
            pairs=whole * x.heads * (latent.nope_dim + latent.value_dim),
            shared=whole * latent.rope_dim,
            values=whole * x.heads * latent.value_dim,
        )


def latent_operators(x: ActivationNumbers, latent: LatentAttention) -> tuple[OperatorMemory, ...]:
    """Return the operators of latent attention, from the norm before to the output."""
    sizes, sent = _Widths.of(x, latent), elementwise_max(x.ring, x.exchanged)
    cut = int(latent.value_dim < x.head_dim)
    branch = ResidualBranch(
        inner=(1 - sent) * sizes.values, flushed=sent, groups=(ATTENTION_IN, ATTENTION_OUT)
    )
    # Variables of the forward pass; the narrow vector of keys goes on as a part of what led down.
    raw = sizes.queries + sizes.pairs + 2 * sizes.shared
    own, vector_made = cut * sizes.values, sizes.query_vector
    attention = attention_core_operator(replace(x, rope=1), branch, raw + 3 * x.queries, own)
    padded = saved_tensors(ATTENTION, ("values", (1 - sent) * x.queries, "N H h s"))
    values = x.tokens * x.heads * latent.value_dim
    kept = x.copied_bytes(values) + (1 - x.in_fp8) * x.learns(ATTENTION_OUT) * own
    cut_out = saved_tensors("o", ("output without padding", kept, "N H v s"))
    # Keys are of the width of queries, and values are in memory of their own.
    by_position = tuple(
        one for one in attention.saved if not (cut and one.name == "output, position by position")
    )
    lost = raw + 2 * sent * x.queries + x.exchanged * x.queries
    output = row_parallel_operator(x, "o", sizes.values, 0, lost)
    rank, key_vector = latent.query_rank, sizes.key_vector
    # Without a rank queries come out of the stream: it is kept already, and has two gradients.
    twice = x.stream if rank is None else 0
    q_norm = () if rank is None else (_narrow_norm(x, "q_norm", rank, branch, (0, key_vector)),)
    q_up = _up(x, LATENT_QUERIES, (rank or x.hidden, sizes.queries), branch, key_vector, rank)
    return (
        norm_operator(x, "attention norm", branch),
        _down(x, sizes, branch, twice),
        *q_norm,
        _narrow_norm(x, "kv_norm", latent.kv_rank, branch, (vector_made, vector_made + twice)),
        q_up,
        _up(x, LATENT_KEYS, (latent.kv_rank, sizes.pairs), branch, sizes.queries, latent.kv_rank),
        _sides(x, sizes, branch),
        replace(
            attention,
            saved=(*by_position, *padded),
            # Where the output layer learns, it keeps an input of its own beside this gradient.
            backward_split=attention.backward_split + cut * x.learns(ATTENTION_OUT) * x.queries,
        ),
        replace(output, saved=cut_out, forward=output.forward + own),
    )


def _down(
    x: ActivationNumbers, sizes: _Widths, branch: ResidualBranch, twice: Num
) -> OperatorMemory:
    """Return what leads down; `twice` is a gradient of its input that has come already."""
    learns, narrow = x.learns(LATENT_DOWN), _narrow_rows(x)
    width = sizes.down // elementwise_max(x.rows * x.size, 1) + x.hidden
    product = (1 - x.frozen) * x.widened_bytes(width, x.rows) + narrow
    both = x.stream + sizes.down
    # Queries that come straight out of the stream read the same.
    kept = elementwise_max(learns, is_positive(twice) * x.learns(LATENT_QUERIES)) * x.stream
    what = "attention input and gradients of latent vectors"
    waiting = (what, kept + learns * sizes.down, "n (D + r_q + r_kv + p) s")
    return branch.around(
        x,
        OperatorMemory(
            name=_DOWN,
            saved=saved_tensors(
                _DOWN,
                ("attention input", kept, "n D s"),
                ("latent vectors", sizes.down, "n (r_q + r_kv + p) s"),
            ),
            kept_for_weight_gradient=saved_tensors(_DOWN, waiting),
            forward=both + narrow,
            backward=both + twice,
        ),
        late=(1 - x.shared) * product,
    )


def _narrow_rows(x: ActivationNumbers) -> Num:
    """Return what the A of one of the adapters of what leads down makes of its input, n R s."""
    return x.narrow_bytes(LATENT_DOWN) * x.rows // x.tokens


def _narrow_norm(
    x: ActivationNumbers, name: str, rank: int, branch: ResidualBranch, beside: tuple[Num, Num]
) -> OperatorMemory:
    """Return a norm of a narrow vector; `beside` is there forward, and backward."""
    vector_bytes, statistics = x.rows * rank * x.size, x.rows * x.statistics_bytes
    piece = x.chunk_rows(x.rows, rank) * rank * x.statistics_bytes
    weights = rank * x.statistics_bytes
    pieces = 1 - x.fused_norm
    forward = vector_bytes + statistics + pieces * x.low_precision * (piece + weights)
    work = (
        vector_bytes * (2 + 2 * pieces * (1 - x.low_precision))
        + weights
        + pieces * x.low_precision * (3 * piece + weights)
        + x.fused_norm * x.sum_bytes(x.rows, rank)
    )
    return branch.around(
        x,
        OperatorMemory(
            name=name,
            saved=saved_tensors(name, ("statistics", statistics, "n w")),
            kept_for_weight_gradient=(
                vector_gradient_bytes(name, (1 - x.frozen) * weights, "r w"),
            ),
            forward=beside[0] + forward,
            backward=beside[1] + work,
        ),
    )


def _up(
    x: ActivationNumbers,
    group: int,
    widths: tuple[Num, Num],
    branch: ResidualBranch,
    beside: Num,
    vector: int | None,
) -> OperatorMemory:
    """Return a projection up, from a vector of `widths[0]` to `widths[1]` bytes.

    The vector is kept for it, but where it is none (None): the stream, of which it has 8-bit codes.
    """
    rank, out = widths
    name, fresh = _UP[group], int(vector is not None)
    learns, narrow = x.learns(group), x.narrow_bytes(group)
    whole, own = x.tokens * rank * x.size, fresh * x.rows * rank * x.size
    kept_here = fresh + (1 - fresh) * x.in_fp8
    columns = out // elementwise_max(x.tokens * x.size, 1)
    product = (1 - x.frozen) * weight_gradient_bytes(x, columns, rank, x.tokens) + narrow
    back = fp8_product_bytes(x, columns, rank, x.tokens, turned=1)
    gathered = learns * (x.scattered * whole - x.left_early(whole))
    kept = saved_tensors(
        name,
        ("latent vector", learns * kept_here * x.product_bytes(x.rows * rank), "n r s"),
        ("its gradient", learns * x.product_bytes(out // x.size), "N O s"),
    )
    ahead = x.in_fp8 * kept[0].bytes + fp8_product_bytes(x, columns, rank, x.tokens)
    return branch.around(
        x,
        OperatorMemory(
            name=name,
            saved=kept[:1],
            kept_for_weight_gradient=kept,
            forward=beside + own + x.gathered_bytes(whole) + out + ahead + narrow,
            backward=beside + out + x.in_fp8 * kept[1].bytes + x.summed_bytes(whole) + back,
        ),
        late=branch.row_layer_bytes(x) + elementwise_max(gathered, product - back),
    )


def _sides(x: ActivationNumbers, sizes: _Widths, branch: ResidualBranch) -> OperatorMemory:
    """Return what puts the parts of keys together, and backward takes them apart."""
    turned = x.heads * sizes.shared
    cut = is_positive(x.queries - sizes.values)
    apart = elementwise_max(
        3 * x.queries + cut * sizes.values,
        2 * x.queries + sizes.values + turned + 2 * sizes.shared + sizes.pairs,
    )
    return branch.around(x, OperatorMemory(name=_SIDES, forward=0 * x.queries, backward=apart))
