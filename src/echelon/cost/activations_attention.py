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

from dataclasses import replace

from echelon.core.model_shape import LatentAttention
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
        _scores(x, branch, lost),
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


def _scores(x: ActivationNumbers, branch: Branch, lost: Num) -> Operator:
    """Return what attention itself keeps, locally or over context ranks."""
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
    put_off = most(x.scattered, x.dropout) * x.whole
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


def latent_operators(x: ActivationNumbers, latent: LatentAttention) -> tuple[Operator, ...]:
    """Return the operators of latent attention (DeepSeek-V2, 2024, section 2.1).

    Every head has keys and values of its own (K = H), of the width of a query.
    """
    size = x.size
    down = latent.query_rank + latent.kv_rank + latent.rope_dim
    narrow = x.rows * down * size
    width = latent.nope_dim + latent.value_dim
    cut = int(latent.value_dim < x.head_dim)
    values = x.tokens * x.heads * latent.value_dim * size
    branch = Branch(inner=values, ran=most(x.ring, x.exchanged))
    heads = _scores(replace(x, rope=1), branch, 0)
    padded = Saved(
        operator=ATTENTION,
        name="values",
        bytes=(1 - most(x.ring, x.exchanged)) * x.queries,
        formula="N H h s",
    )
    cut_out = Saved(
        operator="o",
        name="output without padding",
        bytes=cut * values,
        formula="N H h' s",
    )
    # Keys are of the width of queries, and values are in memory of their own.
    by_position = tuple(
        one for one in heads.saved if not (cut and one.name == "output, position by position")
    )
    project = Operator(
        name="q_down, kv_down",
        saved=(
            Saved(
                operator="q_down, kv_down",
                name="attention input",
                bytes=x.stream,
                formula="n D s",
            ),
            Saved(
                operator="q_down, kv_down",
                name="latent vectors",
                bytes=narrow,
                formula="n (r_q + r_kv + p) s",
            ),
        ),
        waits=(
            Saved(
                operator="q_down, kv_down",
                name="attention input and gradients of latent vectors",
                bytes=x.stream + narrow,
                formula="n (D + r_q + r_kv + p) s",
            ),
        ),
    )
    output = row(x, "o", values, 0)
    return (
        norm(x, "attention norm", branch),
        project,
        _latent_norm(x, "q_norm", latent.query_rank),
        _latent_norm(x, "kv_norm", latent.kv_rank),
        _up(x, "q_up", latent.query_rank, x.heads * x.head_dim),
        _up(x, "kv_up", latent.kv_rank, x.heads * width),
        replace(
            heads,
            saved=(*by_position, padded),
            forward=heads.forward + 3 * x.queries,
            split=heads.split + cut * x.queries,
        ),
        replace(output, saved=(cut_out, *output.saved), forward=output.forward + cut_out.bytes),
    )


def _latent_norm(x: ActivationNumbers, name: str, rank: int) -> Operator:
    return Operator(
        name=name,
        saved=(Saved(operator=name, name="statistics", bytes=x.rows * x.wide, formula="n w"),),
        waits=(vector(name, rank * x.wide, "r w"),),
    )


def _up(x: ActivationNumbers, name: str, rank: int, out: Num) -> Operator:
    saved = Saved(
        operator=name, name="latent vector", bytes=x.rows * rank * x.size, formula="n r s"
    )
    gradient = Saved(
        operator=name, name="its gradient", bytes=x.tokens * out * x.size, formula="N O s"
    )
    return Operator(name=name, saved=(saved,), waits=(saved, gradient))
