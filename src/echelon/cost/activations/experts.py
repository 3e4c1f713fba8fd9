# SPDX-License-Identifier: Apache-2.0
"""What a mixture of experts keeps of a microbatch: the router, the way of tokens, the experts.

Beside the letters of `cost/activations/numbers.py`: r rows that this rank routes, m that it
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

from echelon.cost.activations.dispatch import (
    BackwardRemainder,
    DispatchChunk,
    arrival_bytes,
    backward_bytes,
    bytes_in_flight,
    forward_bytes,
)
from echelon.cost.activations.linear import (
    ResidualBranch,
    fp8_product_bytes,
    norm_operator,
    norm_saved,
    weight_gradient_bytes,
)
from echelon.cost.activations.numbers import (
    ActivationNumbers,
    Num,
    OperatorMemory,
    SavedTensor,
    elementwise_max,
    is_positive,
    saved_tensors,
    total_saved_bytes,
)
from echelon.cost.bytes.terms import INDEX_BYTES

ROUTER, DISPATCH, EXPERTS, SHARED = "router", "dispatch", "experts", "shared experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNumbers:
    """Give the sizes of a mixture on one rank, in the letters of this file; flags are 0 or 1."""

    routed: Num
    """Rows r that this rank routes."""
    experts: Num
    """Experts E of a block."""
    top_k: Num
    """Experts k that a token meets."""
    here: Num
    """Rows A at the experts of this rank."""
    inner: Num
    """Inner width G of an expert, of one piece."""
    shared_inner: Num
    """Inner width F' of the experts that every token meets."""
    places: Num
    """Bytes of what the dispatch knows of rows."""
    spare: Num = 0
    """Flag: rows come in memory with one more row than there are."""
    renormalised: Num = 1
    """Flag: the gates of a token are made to add up to 1."""
    sigmoid: Num = 0
    """Flag: scores are sigmoids, not a softmax."""
    auxiliary: Num = 0
    """Flag: there is a loss for the load."""
    by_sequence: Num = 0
    """Flag: that loss is of each sequence or microbatch."""
    z_loss: Num = 0
    """Flag: there is a z-loss."""
    limiting: Num = 0
    """Bytes that a router has while it finds what experts have room for."""
    chunks: tuple[DispatchChunk, ...] = ()
    """What rows send and hold, chunk by chunk (`cost/activations/dispatch.py`)."""
    deferred: int = 0
    """Bytes that weight gradients of experts keep which are put off until rows are waited for."""
    product: int = 0
    """Bytes of rows that those gradients widen, where they add up in another dtype."""
    vectors: Num = 0
    """Bytes of the gradients of biases of experts."""
    logit_bias: Num = 0
    """Flag: the logits of the router have a bias."""
    row_chunks: Num = 0
    """Flag: experts are cut, so that every tensor rank needs every row."""
    up: Num = 2
    """2 for gated experts, else 1."""
    unfused: Num = 0
    """Flag: the outputs of experts, and what is inside of them, are kept; ours make both again."""


def mixture_operators(x: ActivationNumbers, e: ExpertNumbers) -> tuple[OperatorMemory, ...]:
    """Return the operators of a mixture of experts, from the norm before to the output."""
    flow = _MixtureState.of(x, e)
    return (
        norm_operator(x, "mlp norm", ResidualBranch(local=x.stream, alone=1 - _any_shared(e))),
        _router(x, e, flow),
        _dispatch(x, e, flow),
        _shared(x, e, flow),
        _experts(x, e, flow),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _MixtureState:
    """Say what is there beside the operators of a mixture: variables, and rows on their way.

    `local` are the variables of the forward pass. Beside the gradient of the stream, `until` is
    there until all rows have departed, and `held` for experts that every token meets, too. `back`
    and `split` are what experts leave in a whole backward pass, and in one that W completes.
    """

    local: Num
    until: Num
    held: Num
    back: BackwardRemainder
    split: BackwardRemainder

    @classmethod
    def of(cls, x: ActivationNumbers, e: ExpertNumbers) -> _MixtureState:
        """Return the flow of a mixture."""
        tokens = 2 * x.tokens * INDEX_BYTES + e.routed * e.top_k * x.statistics_bytes
        gathered = e.row_chunks * (x.scattered * x.whole + x.tokens * e.top_k * x.statistics_bytes)
        deferred = bool(e.deferred)
        return cls(
            local=x.stream + tokens + gathered,
            until=(e.row_chunks * x.scattered) * x.whole + x.apart * x.stream,
            held=x.apart * _any_shared(e) * x.stream,
            back=backward_bytes(e.chunks, deferred=deferred, product=e.product, split=False),
            split=backward_bytes(e.chunks, deferred=deferred, product=e.product, split=True),
        )


def _dispatch(x: ActivationNumbers, e: ExpertNumbers, flow: _MixtureState) -> OperatorMemory:
    shared = _any_shared(e)
    # Those of column layers, which gather their input, wait until here.
    made = weight_gradient_bytes(x, 2 * e.shared_inner, x.hidden, x.tokens)
    late = (1 - x.frozen) * shared * x.scattered
    late = late * (2 * x.tokens * e.shared_inner * x.size + x.whole + made)
    back = replace(flow.back, deferred=0) if shared else flow.back
    landing = arrival_bytes(e.chunks, back, e.product)
    arrived = arrival_bytes(e.chunks, flow.split, 0)
    beside = (1 + shared) * x.stream
    return OperatorMemory(
        name=DISPATCH,
        saved=saved_tensors(DISPATCH, ("places of rows", e.places, "places")),
        forward=e.places + flow.local + bytes_in_flight(e.chunks),
        backward=beside + elementwise_max(landing, late + back.in_flight),
        backward_split=beside + arrived,
    )


def mixture_saved(x: ActivationNumbers, e: ExpertNumbers) -> tuple[SavedTensor, ...]:
    """Return what a mixture keeps, but for where its rows come from and go to."""
    norm = norm_saved(x, "mlp norm")
    return (*norm, *_router_saved(x, e), *_experts_saved(x, e), *_shared_saved(x, e))


def _router_saved(x: ActivationNumbers, e: ExpertNumbers) -> tuple[SavedTensor, ...]:
    scores = e.routed * e.experts * x.statistics_bytes
    one = e.routed * x.statistics_bytes
    return saved_tensors(
        ROUTER,
        ("mlp input", x.in_fp8 * x.stream + (1 - x.in_fp8) * x.matmul_stream, "n D s"),
        ("scores", scores, "r E w"),
        ("choices", e.routed * e.top_k * INDEX_BYTES, "r k 8"),
        ("gates and their sum", e.renormalised * (e.top_k + 1) * one, "r (k + 1) w"),
        ("sum of scores", e.auxiliary * e.sigmoid * one, "r w"),
        ("shares of a sequence", e.auxiliary * e.by_sequence * scores, "r E w"),
        ("logits and their log-sum-exp", e.z_loss * (scores + one), "r (E + 1) w"),
    )


def _experts_saved(x: ActivationNumbers, e: ExpertNumbers) -> tuple[SavedTensor, ...]:
    rows, inner = (e.here + e.spare) * x.hidden * x.size, e.here * e.inner
    return saved_tensors(
        EXPERTS,
        ("rows", _rows_kept(x, e), "A D s"),
        ("gates", (e.here + e.spare) * x.statistics_bytes, "A w"),
        ("gate and up", e.up * inner * x.size, "2 A G s"),
        ("rows of outputs", e.unfused * rows, "A D s"),
        ("inner activations", e.unfused * inner * x.matmul_size, "A G s"),
    )


def _rows_kept(x: ActivationNumbers, e: ExpertNumbers) -> Num:
    """Return the bytes of rows that arrived, as experts keep them."""
    whole = (e.here + e.spare) * x.hidden * x.size
    return x.copied_bytes(e.here * x.hidden) + (1 - x.in_fp8) * whole


def _shared_saved(x: ActivationNumbers, e: ExpertNumbers) -> tuple[SavedTensor, ...]:
    inner = x.tokens * e.shared_inner
    own = _any_shared(e) * x.copied_bytes(x.rows * x.hidden)
    return saved_tensors(
        SHARED,
        ("input in 8 bits", own, "n D"),
        ("gate and up", e.up * inner * x.size, "2 N F' s"),
        ("inner activation", (1 - x.frozen) * x.product_bytes(inner), "N F' s"),
    )


def _router(x: ActivationNumbers, e: ExpertNumbers, flow: _MixtureState) -> OperatorMemory:
    scores, saved = e.routed * e.experts * x.statistics_bytes, _router_saved(x, e)
    work = x.stream + 2 * x.whole + 2 * scores
    return OperatorMemory(
        name=ROUTER,
        saved=saved,
        kept_for_weight_gradient=saved_tensors(
            ROUTER,
            ("mlp input", x.stream, "n D s"),
            ("gradient of the scores", scores, "r E w"),
            ("gradient of the bias", e.logit_bias * e.experts * x.statistics_bytes, "E w"),
        ),
        forward=total_saved_bytes(saved) + flow.local + elementwise_max(2 * scores, e.limiting),
        backward=work,
        backward_split=work,
    )


def _experts(x: ActivationNumbers, e: ExpertNumbers, flow: _MixtureState) -> OperatorMemory:
    inner = e.here * e.inner
    gradients = _rows_kept(x, e)
    beside = flow.local + _any_shared(e) * x.stream
    return OperatorMemory(
        name=EXPERTS,
        saved=_experts_saved(x, e),
        kept_for_weight_gradient=saved_tensors(
            EXPERTS,
            ("rows", _rows_kept(x, e), "A D s"),
            ("gradients of the outputs", gradients, "A D s"),
            ("inner activations and gradients", x.product_bytes(3 * inner), "3 A G s"),
            ("gradients of biases", e.vectors, "E (D + 2 G) w"),
        ),
        forward=beside + forward_bytes(e.chunks, graph=True),
        forward_without_graph=beside + forward_bytes(e.chunks, graph=False),
        # Whoever waits for rows runs what was put off.
        rerun=beside + bytes_in_flight(e.chunks),
        backward=x.stream
        + elementwise_max(flow.until + flow.back.departing_peak, flow.held + flow.back.peak),
        backward_split=x.stream
        + elementwise_max(flow.until + flow.split.departing_peak, flow.held + flow.split.peak),
    )


def _any_shared(e: ExpertNumbers) -> Num:
    return is_positive(e.shared_inner)


def _shared(x: ActivationNumbers, e: ExpertNumbers, flow: _MixtureState) -> OperatorMemory:
    numbers, learns = x.tokens * e.shared_inner, 1 - x.frozen
    inner = numbers * x.size
    any_shared = _any_shared(e)
    gradient = any_shared * x.product_bytes(x.tokens * x.hidden)
    gather = x.scattered * x.whole
    made = x.summed_bytes(x.whole) - x.scattered * x.stream
    apart = 2 * (1 - x.low_precision) * (1 - x.fused_swiglu)
    work = elementwise_max((3 + apart) * inner, 2 * inner + made)
    # Products of 8-bit numbers: of both layers forward, and of either backward.
    ahead = elementwise_max(
        fp8_product_bytes(x, 2 * e.shared_inner, x.hidden, x.tokens),
        fp8_product_bytes(x, x.hidden, e.shared_inner, x.tokens),
    )
    back = elementwise_max(
        fp8_product_bytes(x, 2 * e.shared_inner, x.hidden, x.tokens, turned=1),
        fp8_product_bytes(x, x.hidden, e.shared_inner, x.tokens, turned=1),
    )
    deferred = flow.back.deferred
    # They run when something is in flight: the gradient, or rows, or, of whole rows, the input's.
    late = x.shared * (1 - x.scattered) * deferred
    own = weight_gradient_bytes(x, 2 * e.shared_inner, x.hidden, x.tokens)
    row = weight_gradient_bytes(x, x.hidden, e.shared_inner, x.tokens)
    first = deferred + elementwise_max(gather, (1 - x.scattered) * inner) + e.product
    # By the time of the input's all is gone that is kept here, but what row layers put off.
    column = x.whole + own - (1 - x.shared) * inner
    if_whole = (1 - x.scattered) * (late + column - flow.held)
    # Of split rows, the gradient of all outputs waits beside the inputs that come.
    if_split = x.scattered * (
        (3 - elementwise_max(x.tp_ring, x.tp_fused)) * x.whole + x.stream + row - flow.held
    )
    whole = elementwise_max(first, gather + inner, late + work, if_whole, if_split)
    split = elementwise_max(gather + inner, work)
    beside = flow.local + bytes_in_flight(e.chunks)
    return OperatorMemory(
        name=SHARED,
        saved=_shared_saved(x, e),
        kept_for_weight_gradient=saved_tensors(
            SHARED,
            ("input in 8 bits", any_shared * x.copied_bytes(x.rows * x.hidden), "n D"),
            ("gradient of gate and up", learns * x.product_bytes(2 * numbers), "2 N F' s"),
            ("inner activation", learns * x.product_bytes(numbers), "N F' s"),
            ("gradient of the output", learns * gradient, "N D s"),
        ),
        forward=any_shared * (beside + 3 * inner + made + x.gathered_bytes(x.whole) + ahead),
        backward=any_shared * (x.stream + flow.held + flow.back.in_flight + whole + back),
        backward_split=any_shared * (x.stream + flow.held + flow.split.in_flight + split + back),
    )
