# SPDX-License-Identifier: Apache-2.0
"""What attention of a block keeps: projections, positions, scores, and the way to the output.

In the letters of `cost/activations/numbers.py`. Of the projections side by side, [N, (H + 2 K) h],
only the values are kept where rotary positions (or norms of heads) make queries and keys anew; but
a view keeps the memory of all three. Over context ranks keys and values are put into one tensor
first, so that memory may go, and with heads exchanged for positions that of the queries, too.

Sources: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
section 4.1 (11 s b h and the scores, of which none is kept here: Dao, "FlashAttention-2", 2023,
section 3.1); Ainslie et al., "GQA", 2023.
"""

from __future__ import annotations

from dataclasses import replace

from echelon.cost.activations.linear import (
    ATTENTION_IN,
    ATTENTION_OUT,
    ResidualBranch,
    column_input,
    column_parallel_operator,
    norm_operator,
    norm_saved,
    row_parallel_operator,
    vector_gradient_bytes,
    weight_gradient_bytes,
)
from echelon.cost.activations.numbers import (
    ActivationNumbers,
    Num,
    elementwise_max,
    holds,
    is_positive,
)
from echelon.cost.activations.operator_memory import (
    OperatorMemory,
    SavedTensor,
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
