# SPDX-License-Identifier: Apache-2.0
"""Memory of attention of a block: projections, positions, scores, and the way to the output.

In the letters of `cost/activations/numbers.py`. Of the projections side by side, [N, (H + 2 K) h],
only the values are kept where rotary positions (or norms of heads) make queries and keys anew; but
a view keeps the memory of all three. Over context ranks keys and values are put into one tensor
first, so that memory may go, and with heads exchanged for positions that of the queries, too.

Sources: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
section 4.1 (11 s b h and the scores, of which none is kept here: Dao, "FlashAttention-2", 2023,
section 3.1); Ainslie et al., "GQA", 2023.

Latent attention (DeepSeek-V2, 2024, section 2.1): r_q and r_kv are the widths of the narrow
vectors, p and o those of the parts of a key that carry positions and that do not, v that of a
value. Every head has keys and values of its own (K = H), of the width of a query: h = o + p. What
leads down is whole on every tensor rank, for the rows that it holds; what leads up is split by
heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.core.model_shape import LatentAttention
from echelon.cost.activations.linear import (
    ATTENTION_IN,
    ATTENTION_OUT,
    LATENT_DOWN,
    LATENT_KEYS,
    LATENT_QUERIES,
    ResidualBranch,
    column_input,
    column_parallel_operator,
    fp8_product_bytes,
    norm_operator,
    norm_saved,
    row_parallel_operator,
    vector_gradient_bytes,
    weight_gradient_bytes,
)
from echelon.cost.activations.numbers import (
    ActivationNumbers,
    Num,
    OperatorMemory,
    SavedTensor,
    elementwise_max,
    holds,
    is_positive,
    saved_tensors,
    total_saved_bytes,
)

ATTENTION = "attention"


def attention_operators(x: ActivationNumbers) -> tuple[OperatorMemory, ...]:
    """Return the operators of grouped-query attention, from the norm before to the output."""
    x = x.of_attention
    made = (x.heads + 2 * x.kv_heads) * x.head_dim
    # Variables of the forward pass, which live on whether they are kept or not.
    turned = queries_are_copied(x) * (x.queries + x.keys)
    lost = (1 - _projections_kept(x)) * (x.queries + 2 * x.keys)
    branch = attention_branch(x)
    # At the norm, the gradients of its output are one.
    alone = replace(x, beside=0)
    norm = (norm_operator(alone, "attention norm", branch),) if holds(x.norm_before) else ()
    return (
        *norm,
        column_parallel_operator(x, "q, k, v", "attention input", made, branch),
        _heads(x, branch),
        attention_core_operator(x, branch, lost + turned),
        _output(x, lost),
    )


def attention_branch(x: ActivationNumbers) -> ResidualBranch:
    """Return what is there beside the operators of grouped-query attention."""
    sent = elementwise_max(x.ring, x.exchanged)
    column = x.tokens * ((x.heads + 2 * x.kv_heads) * x.head_dim) * x.size
    return ResidualBranch(
        inner=x.queries * (1 - sent),
        column=column,
        flushed=sent,
        groups=(ATTENTION_IN, ATTENTION_OUT),
    )


def queries_are_copied(x: ActivationNumbers) -> Num:
    """Return whether queries are in memory of their own when attention takes them."""
    return elementwise_max(x.rope, x.qk_norm)


def _projections_kept(x: ActivationNumbers) -> Num:
    """Return whether the memory of queries, keys and values side by side is kept."""
    local = 1 - elementwise_max(x.ring, x.exchanged)
    # Attention sees the queries themselves only where no heads are exchanged.
    return elementwise_max(
        x.projected, local, x.qk_norm, (1 - x.exchanged) * (1 - queries_are_copied(x))
    )


def attention_saved(x: ActivationNumbers) -> tuple[SavedTensor, ...]:
    """Return what grouped-query attention keeps, from the norm before to its output."""
    norm, column = (
        norm_saved(x, "attention norm"),
        column_input(x, "q, k, v", "attention input", ATTENTION_IN),
    )
    return (*norm, column, *_heads_saved(x), *_core_saved(x), *_output_saved(x))


def attention_remade_bytes(x: ActivationNumbers) -> Num:
    """Return how much less is kept where attention is made again from its projections."""
    projections = (1 - _projections_kept(x)) * (x.queries + 2 * x.keys)
    return total_saved_bytes((*_heads_saved(x)[1:], *_core_saved(x))) - projections


def _heads_saved(x: ActivationNumbers) -> tuple[SavedTensor, ...]:
    """Return what is kept of the projections, and of the norms of heads."""
    both = x.queries + 2 * x.keys
    statistics = x.tokens * x.normed_rows * x.statistics_bytes
    return saved_tensors(
        "heads",
        ("queries, keys and values", _projections_kept(x) * both, "N (H + 2 K) h s"),
        ("statistics of heads", statistics, "N (H + K) w"),
    )


def _core_saved(x: ActivationNumbers) -> tuple[SavedTensor, ...]:
    """Return what attention itself keeps, locally or over context ranks."""
    local, kept = 1 - elementwise_max(x.ring, x.exchanged), queries_are_copied(x)
    copied = x.keys * x.copies
    # A copy for the next layer, which keeps that, or 8-bit numbers in its place.
    by_position = elementwise_max(x.exchanged, x.transposed) * x.queries * (1 - x.in_fp8)
    by_position = x.learns(ATTENTION_OUT) * by_position
    exchanged = x.exchanged * (x.queries + 2 * copied)
    return saved_tensors(
        ATTENTION,
        ("queries", kept * (1 - x.exchanged) * x.queries, "N H h s"),
        ("keys", local * kept * x.keys, "N K h s"),
        ("queries, keys and values of own heads", exchanged, "N (H + 2 K') h s"),
        ("keys and values", x.ring * 2 * copied, "2 N K' h s"),
        ("output", x.queries, "N H h s"),
        ("output, position by position", by_position, "N H h s"),
        ("log-sum-exp", x.tokens * x.heads * x.statistics_bytes, "N H w"),
        ("scores", x.scores, "N H T"),
    )


def _heads(x: ActivationNumbers, branch: ResidualBranch) -> OperatorMemory:
    """Return what puts norms and positions to the projections."""
    both, turned = x.queries + 2 * x.keys, x.queries + x.keys
    statistics = x.tokens * x.normed_rows * x.statistics_bytes
    piece = x.chunk_rows(x.tokens, x.heads * x.head_dim) * x.heads * x.head_dim * x.statistics_bytes
    forward = both + statistics + (x.rope + x.qk_norm) * turned
    # One kernel has no pieces, and writes the gradients of all three side by side.
    several = 1 - x.fused_rotary
    forward = forward + several * queries_are_copied(x) * x.low_precision * piece
    # Gradients are turned back and normed one after the other, keys first, then put side by side.
    # While a piece is made, the one before it is there.
    rows = x.chunk_rows(x.tokens, x.heads * x.head_dim)
    turning = both + x.queries + x.low_precision * (1 + is_positive(x.tokens - rows)) * piece
    wide = 1 - x.low_precision
    normed = x.qk_width + (1 - x.qk_width) * x.heads
    norming = (
        2 * x.keys
        + (2 + 2 * wide) * x.queries
        + x.low_precision * (3 * piece + 2 * x.tokens * normed * x.statistics_bytes)
    )
    # What comes from attention as one piece is taken as it is.
    fewer = is_positive(x.heads - x.kv_heads)
    joined = (1 + elementwise_max(queries_are_copied(x), fewer, x.ring, x.exchanged)) * both
    apart = elementwise_max(queries_are_copied(x) * turning, x.qk_norm * norming)
    sums = x.fused_rotary * x.qk_norm * x.sum_bytes(x.tokens, 2 * x.head_dim)
    work = elementwise_max(joined + sums, several * apart)
    widths = x.qk_width * (x.heads + x.kv_heads) + (1 - x.qk_width) * 2
    weights = (1 - x.frozen) * x.qk_norm * widths * x.head_dim * x.statistics_bytes
    return branch.around(
        x,
        OperatorMemory(
            name="heads",
            saved=_heads_saved(x),
            kept_for_weight_gradient=(vector_gradient_bytes("heads", weights, "2 h w"),),
            forward=forward,
            backward=work,
        ),
    )


def attention_core_operator(
    x: ActivationNumbers, branch: ResidualBranch, lost: Num, own: Num = 0
) -> OperatorMemory:
    """Return attention itself, locally or over context ranks.

    `lost` are variables of the forward pass, `own` the input of the output layer where attention
    does not keep it.
    """
    table = _core_saved(x)
    # The copy by position comes when all else is there; heads exchanged are told with the rest.
    last = (1 - x.exchanged) * (total_saved_bytes(table) - table[0].bytes - table[1].bytes)
    # Where attention sends something, the weight gradient of the output layer is made meanwhile.
    sent = elementwise_max(x.ring, x.exchanged)
    product = weight_gradient_bytes(x, x.hidden, x.heads * x.head_dim, x.tokens)
    product = (1 - x.frozen) * product + 2 * x.narrow_bytes(ATTENTION_OUT)
    # Until then it keeps its gradient, and its input where that is in memory of its own.
    deferred = x.learns(ATTENTION_OUT) * (elementwise_max(x.scattered, x.apart) * x.whole + own)
    alone = (1 - x.exchanged) * x.transposed * x.queries
    first = sent * (deferred + elementwise_max(x.attend_first, x.attend_run + product))
    waits = (1 - sent) * x.shared
    # Where heads were exchanged `attend_rest` counts on an output by position that goes then.
    by_position = x.learns(ATTENTION_OUT) * (1 - is_positive(own))
    unkept = x.exchanged * (1 - by_position) * x.queries
    rest = x.attend_rest + unkept + waits * deferred - (1 - waits) * alone
    work = x.queries + elementwise_max(first, rest)
    # The output layer keeps the gradient of the block's output, where that is what it was given.
    same = x.learns(ATTENTION_OUT) * x.passed_on * (1 - x.scattered) * x.whole
    without = x.queries + elementwise_max(first - sent * same, rest - waits * same)
    # In B that output does not go: it waits, or was not kept.
    waiting = x.exchanged * (1 - x.in_fp8) * x.queries
    sinks = (1 - x.frozen) * x.sinks * x.heads * x.statistics_bytes
    return OperatorMemory(
        name=ATTENTION,
        saved=table,
        kept_for_weight_gradient=(vector_gradient_bytes(ATTENTION, sinks, "H w"),),
        forward=lost + elementwise_max(x.attend_forward, last),
        backward=x.around + work,
        output_gradient=x.one_norm * x.stream + work - without,
        # What the output layer keeps until W, where it learns, is in this memory.
        backward_split=branch.split_stream_gradient(x)
        + (1 - x.learns(ATTENTION_OUT)) * x.queries
        + elementwise_max(x.attend_first, x.attend_rest + waiting),
    )


def _output(x: ActivationNumbers, lost: Num) -> OperatorMemory:
    """Return the output layer; `lost` are the projections where no layer keeps them."""
    operator = row_parallel_operator(x, "o", x.queries, x.output_bias, lost)
    return replace(operator, saved=_output_saved(x))


def _output_saved(x: ActivationNumbers) -> tuple[SavedTensor, ...]:
    """Return what the output layer keeps beside attention: its input in 8 bits."""
    numbers = x.tokens * x.heads * x.head_dim
    return saved_tensors("o", ("input", x.copied_bytes(numbers), "N H h"))


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
