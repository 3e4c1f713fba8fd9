"""What latent attention of a block keeps and works with (DeepSeek-V2, 2024, section 2.1).

In the letters of `cost/activation_numbers.py`; r_q and r_kv are the widths of the narrow vectors, p
and o those of the parts of a key that carry positions and that do not, v that of a value. Every
head has keys and values of its own (K = H), of the width of a query: h = o + p. What leads down is
whole on every tensor rank, for the rows that it holds; what leads up is split by heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.core.model_shape import LatentAttention
from echelon.cost.activation_numbers import ActivationNumbers, Num, Operator, Saved, most
from echelon.cost.activations_attention import ATTENTION, scores
from echelon.cost.activations_linear import Branch, norm, row, vector

_DOWN, _SIDES = "q_down, kv_down", "heads"


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
        return cls(
            down=here * (latent.query_rank + latent.kv_rank + latent.rope_dim),
            query_vector=here * latent.query_rank,
            key_vector=here * latent.kv_rank,
            queries=x.queries,
            pairs=whole * x.heads * (latent.nope_dim + latent.value_dim),
            shared=whole * latent.rope_dim,
            values=whole * x.heads * latent.value_dim,
        )


def latent_operators(x: ActivationNumbers, latent: LatentAttention) -> tuple[Operator, ...]:
    """Return the operators of latent attention, from the norm before to the output."""
    sizes, sent = _Widths.of(x, latent), most(x.ring, x.exchanged)
    cut = int(latent.value_dim < x.head_dim)
    branch = Branch(inner=(1 - sent) * sizes.values, ran=sent)
    # Variables of the forward pass; the narrow vector of keys goes on as a part of what led down.
    raw = sizes.queries + sizes.pairs + 2 * sizes.shared
    own, vector_made = cut * sizes.values, sizes.query_vector
    attention = scores(replace(x, rope=1), branch, raw + 3 * x.queries, own)
    padded = Saved(
        operator=ATTENTION, name="values", bytes=(1 - sent) * x.queries, formula="N H h s"
    )
    cut_out = Saved(operator="o", name="output without padding", bytes=own, formula="N H v s")
    # Keys are of the width of queries, and values are in memory of their own.
    by_position = tuple(
        one for one in attention.saved if not (cut and one.name == "output, position by position")
    )
    lost = raw + 2 * sent * x.queries + x.exchanged * x.queries
    output = row(x, "o", sizes.values, 0, lost)
    return (
        norm(x, "attention norm", branch),
        _down(x, sizes, branch),
        _narrow_norm(x, "q_norm", latent.query_rank, branch, (0, sizes.key_vector)),
        _narrow_norm(x, "kv_norm", latent.kv_rank, branch, (vector_made, vector_made)),
        _up(x, "q_up", (latent.query_rank, sizes.queries), branch, sizes.key_vector),
        _up(x, "kv_up", (latent.kv_rank, sizes.pairs), branch, sizes.queries),
        _sides(x, sizes, branch),
        replace(
            attention,
            saved=(*by_position, padded),
            split=attention.split + cut * x.queries,
        ),
        replace(
            output,
            saved=(cut_out, *output.saved),
            forward=output.forward + cut_out.bytes,
        ),
    )


def _down(x: ActivationNumbers, sizes: _Widths, branch: Branch) -> Operator:
    product = x.mixed * sizes.down // most(x.rows, 1) * x.hidden
    work = branch.skip(x, split=False) + sizes.down + x.stream
    return Operator(
        name=_DOWN,
        saved=(
            Saved(operator=_DOWN, name="attention input", bytes=x.stream, formula="n D s"),
            Saved(
                operator=_DOWN,
                name="latent vectors",
                bytes=sizes.down,
                formula="n (r_q + r_kv + p) s",
            ),
        ),
        waits=(
            Saved(
                operator=_DOWN,
                name="attention input and gradients of latent vectors",
                bytes=x.stream + sizes.down,
                formula="n (D + r_q + r_kv + p) s",
            ),
        ),
        forward=x.stream + sizes.down,
        backward=work + (1 - x.shared) * product,
        split=branch.skip(x, split=True) + sizes.down + x.stream,
    )


def _narrow_norm(
    x: ActivationNumbers, name: str, rank: int, branch: Branch, beside: tuple[Num, Num]
) -> Operator:
    """Return a norm of a narrow vector; `beside` is there forward, and backward."""
    vector_bytes, statistics = x.rows * rank * x.size, x.rows * x.wide
    piece = x.piece(x.rows, rank) * rank * x.wide
    weights = rank * x.wide
    forward = vector_bytes + statistics + x.narrow * (piece + weights)
    work = vector_bytes * (2 + 2 * (1 - x.narrow)) + weights + x.narrow * (3 * piece + weights)
    return Operator(
        name=name,
        saved=(Saved(operator=name, name="statistics", bytes=statistics, formula="n w"),),
        waits=(vector(name, weights, "r w"),),
        forward=beside[0] + forward,
        backward=branch.skip(x, split=False) + branch.late(x) + beside[1] + work,
        split=branch.skip(x, split=True) + beside[1] + work,
    )


def _up(
    x: ActivationNumbers, name: str, widths: tuple[int, Num], branch: Branch, beside: Num
) -> Operator:
    """Return a projection up, from a vector of `widths[0]` to `widths[1]` bytes."""
    rank, out = widths
    whole = x.tokens * rank * x.size
    own = x.rows * rank * x.size
    product = x.mixed * (out // most(x.tokens, 1)) * rank
    gathered = x.scattered * whole
    saved = Saved(operator=name, name="latent vector", bytes=own, formula="n r s")
    gradient = Saved(operator=name, name="its gradient", bytes=out, formula="N O s")
    work = beside + out + whole + x.scattered * own
    return Operator(
        name=name,
        saved=(saved,),
        waits=(saved, gradient),
        forward=beside + own + gathered + out,
        backward=branch.skip(x, split=False) + branch.late(x) + work + most(gathered, product),
        split=branch.skip(x, split=True) + work,
    )


def _sides(x: ActivationNumbers, sizes: _Widths, branch: Branch) -> Operator:
    """Return what puts the parts of keys together, and backward takes them apart."""
    turned = x.heads * sizes.shared
    cut = most(x.queries - sizes.values, 0) // most(x.queries - sizes.values, 1)
    apart = most(
        3 * x.queries + cut * sizes.values,
        2 * x.queries + sizes.values + turned + 2 * sizes.shared + sizes.pairs,
        2 * x.queries + turned + 2 * sizes.shared + sizes.pairs,
    )
    return Operator(
        name=_SIDES,
        saved=(),
        waits=(),
        forward=0 * x.queries,
        backward=branch.skip(x, split=False) + branch.late(x) + apart,
        split=branch.skip(x, split=True) + apart,
    )
