"""What attention of a block keeps: projections, positions, scores, and the way to the output.

In the letters of `cost/activation_numbers.py`. Of the projections side by side, [N, (H + 2 K) h],
only the values are kept where rotary positions (or norms of heads) make queries and keys anew; but
a view keeps the memory of all three. Over context ranks keys and values are put into one tensor
first, so that memory may go, and with heads exchanged for positions that of the queries, too.

Sources: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
section 4.1 (11 s b h and the scores, of which none is kept here: Dao, "FlashAttention-2", 2023,
section 3.1); Ainslie et al., "GQA", 2023.
"""

from __future__ import annotations

from echelon.cost.activation_numbers import ActivationNumbers, Num, Operator, Saved, most, total
from echelon.cost.activations_linear import Branch, column, norm, row, vector

ATTENTION = "attention"


def attention_operators(x: ActivationNumbers) -> tuple[Operator, ...]:
    """Return the operators of grouped-query attention, from the norm before to the output."""
    made = (x.heads + 2 * x.kv_heads) * x.head_dim
    # Variables of the forward pass, which live on whether they are kept or not.
    turned = own_queries(x) * (x.queries + x.keys)
    lost = (1 - _projections_kept(x)) * (x.queries + 2 * x.keys) + turned
    inner = x.queries * (1 - most(x.ring, x.exchanged))
    branch = Branch(inner=inner, column=x.tokens * made * x.size, ran=most(x.ring, x.exchanged))
    return (
        norm(x, "attention norm", branch),
        column(x, "q, k, v", "attention input", made, branch),
        _heads(x, branch),
        scores(x, branch, lost),
        _output(x, branch, lost),
    )


def own_queries(x: ActivationNumbers) -> Num:
    """Return whether queries are in memory of their own when attention takes them."""
    return most(x.rope, x.qk_norm)


def _projections_kept(x: ActivationNumbers) -> Num:
    """Return whether the memory of queries, keys and values side by side is kept."""
    local = 1 - most(x.ring, x.exchanged)
    # Attention sees the queries themselves only where no heads are exchanged.
    return most(local, x.qk_norm, (1 - x.exchanged) * (1 - own_queries(x)))


def _heads(x: ActivationNumbers, branch: Branch) -> Operator:
    """Return what is kept of the projections, and of the norms and positions of heads."""
    kept = _projections_kept(x)
    both = x.queries + 2 * x.keys
    turned = x.queries + x.keys
    statistics = x.qk_norm * x.tokens * (x.heads + x.kv_heads) * x.wide
    piece = x.piece(x.tokens, x.heads * x.head_dim) * x.heads * x.head_dim * x.wide
    forward = both + statistics + (x.rope + x.qk_norm) * turned
    forward = forward + most(x.rope, x.qk_norm) * x.narrow * piece
    # Gradients are turned back and normed one after the other, keys first, then put side by side.
    turning = both + x.queries + x.narrow * 2 * piece
    wide = 1 - x.narrow
    norming = (
        2 * x.keys
        + (2 + 2 * wide) * x.queries
        + x.narrow * (3 * piece + 2 * x.tokens * x.heads * x.wide)
    )
    # What comes from attention as one piece is taken as it is.
    fewer = most(x.heads - x.kv_heads, 0) // most(x.heads - x.kv_heads, 1)
    joined = (1 + most(own_queries(x), fewer, x.ring, x.exchanged)) * both
    work = most(joined, own_queries(x) * turning, x.qk_norm * norming)
    return Operator(
        name="heads",
        saved=(
            Saved(
                operator="heads",
                name="queries, keys and values",
                bytes=kept * both,
                formula="N (H + 2 K) h s",
            ),
            Saved(
                operator="heads",
                name="statistics of heads",
                bytes=statistics,
                formula="N (H + K) w",
            ),
        ),
        waits=(vector("heads", x.qk_norm * 2 * x.head_dim * x.wide, "2 h w"),),
        forward=forward,
        backward=branch.skip(x, split=False) + branch.late(x) + work,
        split=branch.skip(x, split=True) + work,
    )


def scores(x: ActivationNumbers, branch: Branch, lost: Num, own: Num = 0) -> Operator:
    """Return what attention itself keeps, locally or over context ranks.

    `lost` are variables of the forward pass, `own` the input of the output layer where attention
    does not keep it.
    """
    local, kept = 1 - most(x.ring, x.exchanged), own_queries(x)
    copied = x.keys * x.copies
    saved = (
        ("queries", kept * (1 - x.exchanged) * x.queries, "N H h s"),
        ("keys", local * kept * x.keys, "N K h s"),
        (
            "queries, keys and values of own heads",
            x.exchanged * (x.queries + 2 * copied),
            "N (H + 2 K') h s",
        ),
        ("keys and values", x.ring * 2 * copied, "2 N K' h s"),
        ("output", x.queries, "N H h s"),
        ("output, position by position", most(x.exchanged, x.transposed) * x.queries, "N H h s"),
        ("log-sum-exp", x.tokens * x.heads * x.wide, "N H w"),
    )
    table = tuple(
        Saved(operator=ATTENTION, name=name, bytes=size, formula=formula)
        for name, size, formula in saved
    )
    # The copy by position comes when all else is there; heads exchanged are told with the rest.
    last = (1 - x.exchanged) * (total(table) - table[0].bytes - table[1].bytes)
    # Where attention sends something, the weight gradient of the output layer is made meanwhile.
    sent = most(x.ring, x.exchanged)
    product = x.mixed * x.heads * x.head_dim * x.hidden * x.size
    # Until then it keeps its gradient, and its input where that is in memory of its own.
    put_off = most(x.scattered, x.dropout) * x.whole + own
    alone = (1 - x.exchanged) * x.transposed * x.queries
    first = sent * (put_off + most(x.attend_first, x.attend_run + product))
    waits = (1 - sent) * x.shared
    rest = x.attend_rest + waits * put_off - (1 - waits) * alone
    work = x.queries + most(first, rest)
    return Operator(
        name=ATTENTION,
        saved=table,
        waits=(),
        forward=lost + most(x.attend_forward, last),
        backward=branch.skip(x, split=False) + work,
        # What the output layer keeps until W is in this memory.
        split=branch.skip(x, split=True) + most(x.attend_first, x.attend_rest),
    )


def _output(x: ActivationNumbers, branch: Branch, lost: Num) -> Operator:
    local, kept = 1 - most(x.ring, x.exchanged), own_queries(x)
    again = kept * ((1 - x.exchanged) * x.queries + local * x.keys)
    return row(x, "o", x.queries, x.output_bias, most(0, lost - again))
