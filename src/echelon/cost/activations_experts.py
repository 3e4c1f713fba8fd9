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
from echelon.cost.activations_linear import Branch, norm, row

ROUTER, CARRIER, EXPERTS, SHARED = "router", "dispatch", "experts", "shared experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNumbers:
    """Give the sizes of a mixture on one rank, in the letters of this file.

    `places` are the bytes of what the dispatch knows of rows; `spare` is 1 where rows come in
    memory with one more row than there are. `renormalised`, `sigmoid`, `auxiliary` (a loss for the
    load; `by_sequence`: of each sequence or microbatch) and `z_loss` are flags.

    What is there while rows travel, in rows: `flying` while nobody waits for them, `arriving` when
    the last ones have come, beside those that meet experts then; `scattered` in backward; and on
    the way home `returned` when the last ones are put in order, `back` while nobody waits (at most
    `homing` before), `again` what is put together then. Where rows travel at all they are `apart`
    from those that meet experts. They are of `dispatched` tokens, and go in `chunks`.
    `inner_forward` and `inner_backward` are what experts work with inside, one after the other;
    `pieces` says that experts are cut, so that every tensor rank needs every row.
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
    dispatched: Num = 0
    flying: Num = 0
    arriving: Num = 0
    scattered: Num = 0
    returned: Num = 0
    back: Num = 0
    homing: Num = 0
    again: Num = 0
    apart: Num = 0
    chunks: Num = 1
    inner_forward: Num = 0
    inner_backward: Num = 0
    pieces: Num = 0

    def rows(self, count: Num, x: ActivationNumbers) -> Num:
        """Return the bytes of so many rows with their gates."""
        return count * (x.hidden * x.size + x.wide)


def mixture_operators(x: ActivationNumbers, e: ExpertNumbers) -> tuple[Operator, ...]:
    """Return the operators of a mixture of experts, from the norm before to the output."""
    flow = _Flow.of(x, e)
    return (
        norm(x, "mlp norm", Branch(local=x.stream)),
        _router(x, e, flow),
        Operator(
            name=CARRIER,
            saved=_table(CARRIER, (("places of rows", e.places, "places"),)),
            waits=(),
            forward=e.places + flow.local + flow.forward,
            backward=flow.given + flow.dispatched(x, e),
            split=flow.given + flow.dispatched(x, e),
        ),
        _shared(x, e, flow),
        _experts(x, e, flow),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """Say what is there beside the operators of a mixture: variables, and rows on their way.

    `local` are the variables of the forward pass, `forward` the rows under way while experts that
    every token meets compute, `back` those in backward, with what weight gradients keep that are
    put off; `given` are the gradients of the stream.
    """

    local: Num
    forward: Num
    back: Num
    put_off: Num
    given: Num

    @classmethod
    def of(cls, x: ActivationNumbers, e: ExpertNumbers) -> _Flow:
        """Return the flow of a mixture."""
        tokens = 2 * x.tokens * INDEX_BYTES + e.routed * e.top_k * x.wide
        gathered = e.pieces * (x.scattered * x.whole + x.tokens * e.top_k * x.wide)
        put_off = most(e.apart, x.shared)
        inner = e.here * e.inner * x.size
        rows = e.here * x.hidden * x.size
        return cls(
            local=x.stream + tokens + gathered,
            forward=e.rows(e.flying, x),
            back=e.rows(e.back, x),
            put_off=put_off * (3 * inner + 2 * rows) // e.chunks,
            given=x.stream + e.pieces * x.scattered * x.whole,
        )

    def dispatched(self, x: ActivationNumbers, e: ExpertNumbers) -> Num:
        """Return what adds up the gradients of the rows that were dispatched."""
        any_shared = most(0, e.shared_inner) // most(1, e.shared_inner)
        sums = e.dispatched * (x.hidden * x.size + 2 * INDEX_BYTES + e.top_k * x.wide)
        again = e.rows(e.again, x) // e.chunks
        return self.back + again + sums + any_shared * x.whole


def _router(x: ActivationNumbers, e: ExpertNumbers, flow: _Flow) -> Operator:
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
    work = flow.given + 2 * x.whole + 2 * scores
    return Operator(
        name=ROUTER,
        saved=_table(ROUTER, saved),
        waits=_table(
            ROUTER,
            (("mlp input", x.stream, "n D s"), ("gradient of the scores", scores, "r E w")),
        ),
        forward=sum((size for _, size, _ in saved), 0) + flow.local + 2 * scores,
        backward=work,
        split=work,
    )


def _experts(x: ActivationNumbers, e: ExpertNumbers, flow: _Flow) -> Operator:
    each = x.hidden * x.size
    rows = (e.here + e.spare) * each
    inner = e.here * e.inner * x.size
    made = e.here * each // e.chunks
    returned = e.returned * each + e.dispatched * (each + 2 * INDEX_BYTES)
    kept = e.rows(e.here + e.spare, x)
    any_shared = most(0, e.shared_inner) // most(1, e.shared_inner)
    forward = most(
        e.rows(e.arriving, x) + kept,
        kept + made + e.inner_forward,
        kept + 2 * inner + made + returned,
    )
    bare = most(e.rows(e.arriving, x) + kept, kept + made + e.inner_forward, kept + made + returned)
    gates = e.here * x.wide // e.chunks
    put_off = most(e.apart, x.shared)
    back = most(
        e.scattered * each + e.apart * made,
        2 * made + gates + e.inner_backward,
        made + most(flow.back, e.rows(e.homing, x)) + put_off * (inner // e.chunks + made),
    )
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
        forward=flow.local + any_shared * x.whole + forward,
        bare=flow.local + any_shared * x.whole + bare,
        backward=flow.given + back,
        split=flow.given + back,
    )


def _shared(x: ActivationNumbers, e: ExpertNumbers, flow: _Flow) -> Operator:
    inner = x.tokens * e.shared_inner * x.size
    any_shared = most(0, e.shared_inner) // most(1, e.shared_inner)
    down = row(x, SHARED, inner, 0)
    gather = x.scattered * x.whole
    work = most(flow.put_off + gather + inner, (5 - 2 * x.narrow) * inner, 2 * inner + x.whole)
    work = any_shared * (flow.given + flow.back + work)
    return Operator(
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
        forward=any_shared * (flow.local + flow.forward + 3 * inner + x.whole + gather),
        backward=work,
        split=work,
    )


def _table(operator: str, rows: tuple[tuple[str, Num, str], ...]) -> tuple[Saved, ...]:
    return tuple(
        Saved(operator=operator, name=name, bytes=size, formula=formula)
        for name, size, formula in rows
    )
