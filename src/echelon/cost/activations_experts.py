"""What a mixture of experts keeps of a microbatch: the router, the way of tokens, the experts.

Beside the letters of `cost/activation_numbers.py`: r rows that this rank routes, m that it
dispatches, E experts of which a token meets k, S assignments of its rows that are kept, A rows at
its own experts, G inner width of an expert (of one piece), F' of those that every token meets. A
rank keeps, in bytes,

    router         r (E w + k 8 + k w + w)    scores, choices, and what renormalises gates
    its losses     r E w each                 shares by sequence; logits, for a z-loss
    flat           24 S + 8 E + 8 m           where assignments come from and go to
    padded         8 m k + 9 E P              P slots of each expert on a rank
    experts        A (D s + w + 2 G s)        rows, gates, gate and up
    shared         N (2 F' + F') s

Where the tokens go is data: `ExpertNumbers` of a plan are balanced, those of a record exact.
Source: Gale et al., "MegaBlocks", 2022, for what dropless experts keep; the operators are those of
`parallel/expert/`.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.cost.activation_numbers import (
    INDEX_BYTES,
    ActivationNumbers,
    Num,
    Operator,
    Saved,
    most,
)
from echelon.cost.activations_linear import norm, row

ROUTER, CARRIER, EXPERTS, SHARED = "router", "dispatch", "experts", "shared experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNumbers:
    """Give the sizes of a mixture on one rank, in the letters of this file.

    `places` are the bytes of what the dispatch knows of rows; `spare` is 1 where rows come in
    memory with one more row than there are. `renormalised`, `sigmoid`, `auxiliary` (a loss for the
    load; `by_sequence`: of each sequence or microbatch) and `z_loss` are flags.
    """

    routed: Num
    experts: Num
    top_k: Num
    here: Num
    inner: Num
    shared_inner: Num
    places: Num
    spare: Num = 0
    renormalised: Num = 1
    sigmoid: Num = 0
    auxiliary: Num = 0
    by_sequence: Num = 0
    z_loss: Num = 0


def mixture_operators(x: ActivationNumbers, e: ExpertNumbers) -> tuple[Operator, ...]:
    """Return the operators of a mixture of experts, from the norm before to the output."""
    return (
        norm(x, "mlp norm"),
        _router(x, e),
        Operator(
            name=CARRIER,
            saved=(
                Saved(operator=CARRIER, name="places of rows", bytes=e.places, formula="places"),
            ),
            waits=(),
        ),
        _experts(x, e),
        *_shared(x, e),
    )


def _router(x: ActivationNumbers, e: ExpertNumbers) -> Operator:
    scores = e.routed * e.experts * x.wide
    one = e.routed * x.wide
    saved = (
        ("mlp input", x.stream, "n D s"),
        ("scores", scores, "r E w"),
        ("choices", e.routed * e.top_k * INDEX_BYTES, "r k 8"),
        ("gates and their sum", e.renormalised * (e.top_k + 1) * one, "r (k + 1) w"),
        ("sum of scores", e.auxiliary * e.sigmoid * one, "r w"),
        ("shares of a sequence", e.auxiliary * e.by_sequence * scores, "r E w"),
        ("logits and their log-sum-exp", e.z_loss * (scores + one), "r (E + 1) w"),
    )
    return Operator(
        name=ROUTER,
        saved=_table(ROUTER, saved),
        waits=_table(
            ROUTER,
            (("mlp input", x.stream, "n D s"), ("gradient of the scores", scores, "r E w")),
        ),
    )


def _experts(x: ActivationNumbers, e: ExpertNumbers) -> Operator:
    rows = (e.here + e.spare) * x.hidden * x.size
    inner = e.here * e.inner * x.size
    return Operator(
        name=EXPERTS,
        saved=_table(
            EXPERTS,
            (
                ("rows", rows, "A D s"),
                ("gates", (e.here + e.spare) * x.wide, "A w"),
                ("gate and up", 2 * inner, "2 A G s"),
            ),
        ),
        waits=_table(
            EXPERTS,
            (
                ("rows", rows, "A D s"),
                ("gradients of the outputs", rows, "A D s"),
                ("inner activations and gradients", 3 * inner, "3 A G s"),
            ),
        ),
    )


def _shared(x: ActivationNumbers, e: ExpertNumbers) -> tuple[Operator, ...]:
    inner = x.tokens * e.shared_inner * x.size
    any_shared = most(0, e.shared_inner) / most(1, e.shared_inner)
    down = row(x, SHARED, inner, 0)
    return (
        Operator(
            name=SHARED,
            saved=_table(
                SHARED,
                (
                    ("gate and up", 2 * inner, "2 N F' s"),
                    ("inner activation", inner, "N F' s"),
                ),
            ),
            waits=_table(
                SHARED,
                (
                    ("gradient of gate and up", 2 * inner, "2 N F' s"),
                    ("inner activation", inner, "N F' s"),
                    ("gradient of the output", any_shared * down.waits[1].bytes, "N D s"),
                ),
            ),
        ),
    )


def _table(operator: str, rows: tuple[tuple[str, Num, str], ...]) -> tuple[Saved, ...]:
    return tuple(
        Saved(operator=operator, name=name, bytes=size, formula=formula)
        for name, size, formula in rows
    )
