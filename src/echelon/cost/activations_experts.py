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

from dataclasses import dataclass, replace

from echelon.cost.activation_journeys import (
    Chunk,
    Left,
    backward_bytes,
    departed,
    forward_bytes,
    landing_bytes,
)
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

    `limiting` is what a router has while it finds what experts have room for. Rows go to experts
    and home in `chunks` (`cost/activation_journeys.py`); weight gradients of experts may be
    `put_off` until rows are waited for, and have a `product` of their own where they add up in
    another dtype. `pieces` says that experts are cut, so that every tensor rank needs every row.
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
    limiting: Num = 0
    chunks: tuple[Chunk, ...] = ()
    put_off: int = 0
    product: int = 0
    pieces: Num = 0


def mixture_operators(x: ActivationNumbers, e: ExpertNumbers) -> tuple[Operator, ...]:
    """Return the operators of a mixture of experts, from the norm before to the output."""
    flow = _Flow.of(x, e)
    return (
        norm(x, "mlp norm", Branch(local=x.stream, alone=1 - _any_shared(e))),
        _router(x, e, flow),
        _dispatch(x, e, flow),
        _shared(x, e, flow),
        _experts(x, e, flow),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """Say what is there beside the operators of a mixture: variables, and rows on their way.

    `local` are the variables of the forward pass, `given` the gradients of the stream, of which
    `until` are there until all rows have departed, and `held` for experts that every token meets,
    too. `back` and
    `split` are what experts leave in a whole backward pass, and in one that W completes.
    """

    local: Num
    given: Num
    until: Num
    held: Num
    back: Left
    split: Left

    @classmethod
    def of(cls, x: ActivationNumbers, e: ExpertNumbers) -> _Flow:
        """Return the flow of a mixture."""
        tokens = 2 * x.tokens * INDEX_BYTES + e.routed * e.top_k * x.wide
        gathered = e.pieces * (x.scattered * x.whole + x.tokens * e.top_k * x.wide)
        put_off = bool(e.put_off)
        return cls(
            local=x.stream + tokens + gathered,
            given=x.stream,
            until=(e.pieces * x.scattered) * x.whole + x.dropout * x.stream,
            held=x.dropout * _any_shared(e) * x.stream,
            back=backward_bytes(e.chunks, put_off=put_off, product=e.product, split=False),
            split=backward_bytes(e.chunks, put_off=put_off, product=e.product, split=True),
        )


def _dispatch(x: ActivationNumbers, e: ExpertNumbers, flow: _Flow) -> Operator:
    shared = _any_shared(e)
    # Those of column layers, which gather their input, wait until here.
    made = x.mixed * 2 * e.shared_inner * x.hidden * x.size
    late = shared * x.scattered * (2 * x.tokens * e.shared_inner * x.size + x.whole + made)
    back = replace(flow.back, put_off=0) if shared else flow.back
    landing = landing_bytes(e.chunks, back, e.product)
    landed = landing_bytes(e.chunks, flow.split, 0)
    beside = flow.given + shared * x.stream
    return Operator(
        name=CARRIER,
        saved=_table(CARRIER, (("places of rows", e.places, "places"),)),
        waits=(),
        forward=e.places + flow.local + departed(e.chunks),
        backward=beside + most(landing, late + back.flying),
        split=beside + landed,
    )


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
        forward=sum((size for _, size, _ in saved), 0) + flow.local + most(2 * scores, e.limiting),
        backward=work,
        split=work,
    )


def _experts(x: ActivationNumbers, e: ExpertNumbers, flow: _Flow) -> Operator:
    rows = (e.here + e.spare) * x.hidden * x.size
    inner = e.here * e.inner * x.size
    beside = flow.local + _any_shared(e) * x.stream
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
        forward=beside + forward_bytes(e.chunks, graph=True),
        bare=beside + forward_bytes(e.chunks, graph=False),
        # Whoever waits for rows runs what was put off.
        runs=beside + departed(e.chunks),
        backward=flow.given + most(flow.until + flow.back.departs, flow.held + flow.back.peak),
        split=flow.given + most(flow.until + flow.split.departs, flow.held + flow.split.peak),
    )


def _any_shared(e: ExpertNumbers) -> Num:
    return most(0, e.shared_inner) // most(1, e.shared_inner)


def _shared(x: ActivationNumbers, e: ExpertNumbers, flow: _Flow) -> Operator:
    inner = x.tokens * e.shared_inner * x.size
    any_shared = _any_shared(e)
    down = row(x, SHARED, inner, 0)
    gather = x.scattered * x.whole
    work = most((5 - 2 * x.narrow) * inner, 2 * inner + x.whole)
    put_off = flow.back.put_off
    # They run when something is in flight: the gradient, or rows, or, of whole rows, the input's.
    late = x.shared * (1 - x.scattered) * put_off
    own = x.mixed * 2 * e.shared_inner * x.hidden * x.size
    first = put_off + most(gather, (1 - x.scattered) * inner) + e.product
    # By the time of the input's all is gone that is kept here, but what row layers put off.
    column = x.whole + own - (1 - x.shared) * inner
    if_whole = (1 - x.scattered) * (late + column - flow.held)
    # Of split rows, the gradient of all outputs waits beside the inputs that come.
    if_split = x.scattered * (3 * x.whole + x.stream + own // 2 - flow.held)
    whole = most(first, gather + inner, late + work, if_whole, if_split)
    split = most(gather + inner, work)
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
        forward=any_shared * (flow.local + departed(e.chunks) + 3 * inner + x.whole + gather),
        backward=any_shared * (flow.given + flow.held + flow.back.flying + whole),
        split=any_shared * (flow.given + flow.held + flow.split.flying + split),
    )


def _table(operator: str, rows: tuple[tuple[str, Num, str], ...]) -> tuple[Saved, ...]:
    return tuple(
        Saved(operator=operator, name=name, bytes=size, formula=formula)
        for name, size, formula in rows
    )
