# SPDX-License-Identifier: Apache-2.0
"""Bytes that each rank sends in one optimizer step, by axis: equal to what the run records.

Every function gives the terms of one axis; a term is a count of equal collectives. `b` sequences
of `T` positions are a microbatch, N = b T / cp, D is the hidden width, `s` the bytes of an element,
`M` the microbatches per step, `n` the degree of the axis. What buckets send (gradients, parameters)
is in `cost/bytes/data.py`.

Latent attention: r are all its narrow widths together (query_rank + kv_rank + rope_dim), u those
that a layer leads up from (query_rank + kv_rank). Projections down are whole on every rank, so
nothing of width D is sent before the heads, and per block and microbatch

    without sequence parallelism   forward   nothing
                                   backward  2 (n-1)/n N r s   gradients, summed
    with sequence parallelism      forward   (n-1)/n N r s     rows, gathered
                                   backward  the same, gradients scattered, and (n-1)/n N u s for
                                             rows gathered again for the gradients of weights

What stays at width D is one sum after the heads, and the two of a dense MLP.

Where products are of 8-bit numbers, what sequence parallelism gathers for them are codes of 1 byte
in place of s, and in a second collective a scale of 4 bytes for `precision.fp8_block` of them.
Where whole tensors have scales, those travel in the first step alone; in each step one all-reduce
brings together the largest numbers of the model.

Norms over all heads together, of which each tensor rank has a part, send of each token of a
microbatch, per block:

    forward    2 (n-1)/n 2 N max(4, s)   sums of squares of queries and of keys, one all-reduce
    backward   the same                  what pulls their gradients, an all-reduce for each

and forward once more where attention is made again in backward. It is no tensor of the width of the
model: with 4,096 wide heads in bf16 it is a thousandth of what a block sends for its layers.
Source: OLMo 2, 2024, section 2.2, split by heads (`parallel/kernels/width_norm.py`).

Inside of nodes and between them (`far` of a term), exact for each rank: a gather over n ranks is
a message of the own piece to each of the n-1 others: of l ranks on the own node, l-1 go inside, n-l
to other nodes; by an algorithm of our own it is what `all_reduce.py` says. In a step of M
microbatches, with G bytes in the buckets of a rank that ZeRO 3 cuts and frees after use, each
gathered F times (twice a microbatch: 2 M), a rank sends to other nodes

    without secondary slices   F (n-l)/n G
    with them                  (n-l)/n G, and (F-1) (l-1)/l G more inside of its node
    by a hierarchy             F (k-1)/n G

Source: Wang et al., "ZeRO++", 2023, section 3.2 and table 1 (M for the second gather becomes 0).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from echelon.core.axis import Axis
from echelon.core.choices.lora import LATENT_GROUPS, LINEAR_GROUPS
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.model_shape import LatentAttention, ModelShape
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.all_reduce import pairs_sent, ring_sent, slices_sent, sums_sent
from echelon.cost.bytes.context_sent import context_bytes
from echelon.cost.bytes.data import (
    GATHERED,
    data_bytes,
    mirrored_bytes,
    muon_bytes,
    partial_bytes,
    tied_bytes,
)
from echelon.cost.bytes.expert_sent import expert_bytes
from echelon.cost.bytes.local_sgd import mean_outer_bytes
from echelon.cost.bytes.quantised import first_step, fp8_maxima_bytes, fp8_scale_bytes
from echelon.cost.bytes.servers import server_bytes
from echelon.cost.bytes.terms import WIDE_BYTES, SentTerm, pass_terms
from echelon.layout.buckets import BucketPlan, plan_buckets
from echelon.layout.expert_load import ExpertLoad
from echelon.layout.islands import inner_plan, plan_and_rank
from echelon.layout.muon import muon_exchange
from echelon.layout.stage import RankPart, part_of, rank_part
from echelon.schedule.from_plan import messages_from_plan

STEP_ROW_BYTES = 5 * 8
"""What every rank tells all others of a step, as float64: loss, squared norm, stop request, the
seconds that it waited, the bytes that it uses."""

ROUTING_ROW_BYTES = 5 * 8
"""What it tells of its experts: assignments, drops, two losses, the worst imbalance."""

MAXIMA_TERM = "fp8 maxima"
"""Name of the term of the largest numbers that scales of whole tensors in 8 bits come from."""


def bytes_sent(plan: Plan, rank: int, load: ExpertLoad | None = None) -> tuple[SentTerm, ...]:
    """Return the terms of what `rank` sends per step; those of zero bytes are left out.

    What goes to experts depends on the tokens: it is exact for a `load` that was recorded (of the
    rank's expert group), and without one that of a balanced load. Of islands of local SGD these are
    the terms of a mean step (`cost/bytes/local_sgd.py` has those of each).
    """
    if plan.mathematics.local_sgd.active:
        return *bytes_sent(*plan_and_rank(plan, rank), load), *mean_outer_bytes(plan, rank)
    if plan.mesh.servers:
        apart = plan.mathematics.updates.is_asynchronous
        terms = (*server_bytes(plan, rank), *(() if apart else world_bytes(plan, rank)))
        return tuple(term for term in terms if term.bytes)
    part, cp_rank = part_of(plan, rank), plan.mesh.coordinates(rank)[Axis.CP]
    terms = _terms(plan, part, rank, cp_rank, load)
    if OPTIMIZERS[plan.mathematics.optimizer.kind].needs_whole_matrices:
        muon = muon_bytes(plan, muon_exchange(plan, part.pp_rank, part.expert_index), rank)
        terms += tuple(term for term in muon if term.bytes)
    return terms


def bytes_sent_first(plan: Plan, rank: int, load: ExpertLoad | None = None) -> tuple[SentTerm, ...]:
    """Return the terms of the first step of a run.

    Scales of whole tensors have no history then, and rows travel with those of tiles.
    """
    maxima = [term for term in world_bytes(plan, rank) if term.name == MAXIMA_TERM and term.bytes]
    return *bytes_sent(first_step(plan), rank, load), *maxima


def bytes_sent_without_muon(plan: Plan, pp_rank: int, cp_rank: int) -> tuple[SentTerm, ...]:
    """Return what ranks with the same part of the model and of a sequence share: not Muon's.

    The load of experts is balanced.
    """
    if plan.mathematics.local_sgd.active:
        rank = plan.mesh.rank({Axis.PP: pp_rank, Axis.CP: cp_rank})
        inner = bytes_sent_without_muon(inner_plan(plan), pp_rank, cp_rank)
        return *inner, *mean_outer_bytes(plan, rank)
    rank = plan.mesh.rank({Axis.PP: pp_rank})
    if plan.mesh.servers:
        return bytes_sent(plan, rank)
    return _terms(plan, rank_part(plan, pp_rank), rank, cp_rank, None)


def _terms(
    plan: Plan, part: RankPart, rank: int, cp_rank: int, load: ExpertLoad | None
) -> tuple[SentTerm, ...]:
    buckets = plan_buckets(plan, part)
    terms = (
        *data_bytes(plan, part, buckets, rank),
        *tensor_bytes(plan, part, buckets, rank),
        *expert_bytes(plan, part, rank, load),
        *context_bytes(plan, part, cp_rank, plan.mesh.group(rank, Axis.CP)),
        *pipeline_bytes(plan, part, buckets, rank),
        *world_bytes(plan, rank),
    )
    return tuple(term for term in terms if term.bytes)


def bytes_sent_by_axis(plan: Plan, rank: int, load: ExpertLoad | None = None) -> dict[str, int]:
    """Return the bytes that `rank` sends per step over each axis that it uses."""
    total: dict[str, int] = {}
    for term in bytes_sent(plan, rank, load):
        total[term.axis] = total.get(term.axis, 0) + term.bytes
    return total


def tensor_bytes(
    plan: Plan, part: RankPart, buckets: tuple[BucketPlan, ...], rank: int
) -> tuple[SentTerm, ...]:
    """Return the terms of tensor (and sequence) parallelism of the stages of `rank`."""
    degree, ranks = plan.mesh.tp, plan.mesh.group(rank, Axis.TP)
    size, node = DTYPE_BYTES[plan.mathematics.precision.parameters], plan.cluster.devices_per_node
    stream, tokens = stream_bytes(plan), plan.local_tokens
    recomputes = plan.layout.recompute.recomputes
    blocks = sum(one.microbatches * len(one.blocks) for one in part.stages)
    again = sum(one.microbatches * sum(map(recomputes, one.blocks)) for one in part.stages)
    dense = [(one.microbatches, _with_mlp(plan, one.blocks)) for one in part.stages]
    mlps = sum(count * len(found) for count, found in dense)
    mlps_again = sum(count * sum(map(recomputes, found)) for count, found in dense)
    gathered_again = sum(count * _gathers_again(plan, found) for count, found in dense)
    embedded = sum(one.microbatches for one in part.stages if one.first)
    headed = sum(one.microbatches for one in part.stages if one.last)
    if plan.layout.sequence_parallel:
        each, far = slices_sent(plan, ranks, rank, stream // degree)
        forward, backward, ends = (1, 2), (1, 3), 2
        formula = at_once = "(n-1)/n N D s"
        source = "Korthikanti et al., 2022, section 4.2.2"
    else:
        each, far = sums_sent(plan, ranks, rank, (tokens * plan.model.hidden,), size)
        forward, backward, ends = (1, 1), (0, 1), 1
        formula = at_once = "2 (n-1)/n N D s"
        source = "Shoeybi et al., 2019, section 3"

    more = wide_before_heads(plan)
    attention_forward, attention_backward = forward[0] + more[0], backward[0] + more[1]
    backward_count = attention_backward * blocks + backward[1] * mlps
    frozen = plan.model.lora
    if frozen is not None and plan.layout.sequence_parallel:
        # Layers without an adapter need no input again; latent attention has none of that width.
        unread = plan.model.latent is None and not frozen.adapts(LINEAR_GROUPS[0])
        backward_count -= blocks * unread + mlps * (not frozen.adapts(LINEAR_GROUPS[2]))
    inputs_again, messages, one, one_far = 0, 1, each, far
    if plan.layout.tp_ring:
        # A gather or a sum around the ring is a message of one chunk to each but the last rank;
        # inputs for the gradients of weights are gathered at once.
        messages, one, formula = degree - 1, stream // degree, "n D s to the next rank"
        one_far = one * (_next_rank(ranks, rank) // node != rank // node)
        inputs_again = (more[1] - more[0]) * blocks + mlps
    narrow = (0, 0, 0)
    if plan.layout.sequence_parallel and plan.mathematics.precision.is_fp8:
        narrow = (
            more[0] * blocks + mlps,
            more[0] * again + mlps_again + gathered_again,
            (backward[0] + more[0]) * blocks + 2 * mlps,
        )

    def term(name: str, count: int, sent: tuple[int, int], formula: str = at_once) -> SentTerm:
        return SentTerm(
            axis=Axis.TP.value,
            name=name,
            count=count,
            each=sent[0],
            far=sent[1],
            formula=formula,
            source=source,
        )

    at_a_time, whole = (one, one_far), (each, far)
    statistics = 3 * tokens * max(WIDE_BYTES, size)
    return (
        term(
            "blocks forward",
            messages * (attention_forward * blocks + forward[1] * mlps - narrow[0]),
            at_a_time,
            formula,
        ),
        term(
            "blocks forward again",
            messages
            * (attention_forward * again + forward[1] * mlps_again + gathered_again - narrow[1]),
            at_a_time,
            formula,
        ),
        term(
            "blocks backward",
            messages * (backward_count - inputs_again - narrow[2]),
            at_a_time,
            formula,
        ),
        term("blocks backward, inputs again", inputs_again, whole),
        *_fp8_terms(plan, narrow, rank),
        *latent_bytes(plan, blocks, again, rank),
        *width_norm_bytes(plan, part, rank),
        # A frozen table takes no gradient of rows.
        term("embedding", (ends if frozen is None else 1) * embedded, whole),
        term("head", ends * headed, whole),
        term(
            "loss statistics",
            headed,
            slices_sent(plan, ranks, rank, statistics),
            "(n-1) 3 N max(4, s)",
        ),
        partial_bytes(plan, buckets, rank),
    )


def _next_rank(ranks: tuple[int, ...], rank: int) -> int:
    return ranks[(ranks.index(rank) + 1) % len(ranks)]


def _fp8_terms(plan: Plan, counts: tuple[int, int, int], rank: int) -> Iterator[SentTerm]:
    """Yield the terms of rows that are gathered in 8 bits: forward, again, and backward."""
    degree, precision = plan.mesh.tp, plan.mathematics.precision
    numbers, ranks = plan.local_tokens * plan.model.hidden // degree, plan.mesh.group(rank, Axis.TP)
    for name, count in zip(("forward", "forward again", "backward"), counts, strict=True):
        for part, size, formula in (
            ("codes", numbers, "(n-1)/n N D"),
            ("scales", fp8_scale_bytes(numbers, precision), "(n-1)/n N D 4 / block"),
        ):
            each, far = slices_sent(plan, ranks, rank, size)
            yield SentTerm(
                axis=Axis.TP.value,
                name=f"blocks {name}, {part}",
                count=count,
                each=each,
                far=far,
                formula=formula,
                source="DeepSeek-V3, 2024, section 3.3",
            )


def _gathers_again(plan: Plan, blocks: Sequence[int]) -> int:
    """Return how many MLPs gather their input again, the last layer left out: those made again."""
    if not plan.layout.sequence_parallel:
        return 0
    dense = [block for block in blocks if not plan.model.layer_has_experts(block)]
    return sum("mlp" in plan.layout.recompute.operators_of(block) for block in dense)


def _with_mlp(plan: Plan, blocks: tuple[int, ...]) -> list[int]:
    """Return the blocks with an MLP that every token meets: dense ones, and with shared experts."""
    experts = plan.model.experts
    shared = experts is not None and experts.shared_experts > 0
    return [block for block in blocks if shared or not plan.model.layer_has_experts(block)]


def pipeline_bytes(
    plan: Plan, part: RankPart, buckets: tuple[BucketPlan, ...], rank: int
) -> tuple[SentTerm, ...]:
    """Return the terms of pipeline parallelism: one activation on, one gradient back.

    Nothing is sent from a stage to one on the same rank.
    """
    if plan.mesh.pp == 1:
        return ()
    split = plan.mesh.tp if plan.layout.sequence_parallel else 1
    message, node = stream_bytes(plan) // split, plan.cluster.devices_per_node
    ranks, here = plan.mesh.group(rank, Axis.PP), rank // node
    messages = zip(
        ("activations", "gradients"), messages_from_plan(plan, part.pp_rank), strict=True
    )
    terms = [
        SentTerm(
            axis=Axis.PP.value,
            name=f"{name}, to other nodes" if leaves else name,
            count=sum(
                count
                for place, count in by_place.items()
                if (ranks[place] // node != here) is leaves
            ),
            each=message,
            far=leaves * message,
            formula="N D s per stage",
            source="Huang et al., GPipe, 2019",
        )
        for name, by_place in messages
        for leaves in (False, True)
    ]
    return (*terms, tied_bytes(plan, buckets, rank), mirrored_bytes(plan, part, buckets, rank))


def world_bytes(plan: Plan, rank: int) -> tuple[SentTerm, ...]:
    """Return the terms of what all ranks tell one another at the end of a step."""
    row = STEP_ROW_BYTES + (ROUTING_ROW_BYTES if plan.model.experts is not None else 0)
    world = tuple(range(plan.mesh.world_size))
    each, far = pairs_sent(plan, world, rank, row)
    maxima, far_maxima = ring_sent(plan, world, rank, fp8_maxima_bytes(plan))
    return (
        SentTerm(
            axis="world",
            name="step row",
            each=each,
            far=far,
            formula=f"(world - 1) x {row}",
            source="what every rank must know of a step, in one row",
        ),
        SentTerm(
            axis="world",
            name=MAXIMA_TERM,
            each=maxima,
            far=far_maxima,
            formula="2 (world-1)/world x 3 groups x max(4, s)",
            source="Transformer Engine, delayed scaling",
        ),
    )


def stream_bytes(plan: Plan) -> int:
    """Return N D s: the residual stream of one microbatch, whole."""
    return _rows_bytes(plan, plan.model.hidden)


_SOURCE = "DeepSeek-V2, 2024, section 2.1, split by heads"


def wide_before_heads(plan: Plan) -> tuple[int, int]:
    """Return how many collectives of [N, D] attention has before its heads: forward, backward.

    Grouped-query attention gathers the stream (or sums its gradient), latent attention does not.
    """
    if plan.model.latent is not None:
        return 0, 0
    return (1, 2) if plan.layout.sequence_parallel else (0, 1)


def latent_bytes(plan: Plan, blocks: int, again: int, rank: int) -> Iterator[SentTerm]:
    """Yield the terms of the axis "tp" for `blocks` runs of a block, `again` of them repeated."""
    latent, scattered = plan.model.latent, plan.layout.sequence_parallel
    if latent is None:
        return
    widths, ranks = narrow_widths(plan.model, latent), plan.mesh.group(rank, Axis.TP)
    if scattered:
        # Layers without an adapter need no input again.
        lora, read = plan.model.lora, zip(widths[:2], LATENT_GROUPS[1:], strict=True)
        again_for_weights = tuple(w for w, group in read if lora is None or lora.adapts(group))
        once = _piece_for_products(plan, widths[:2]) + _piece(plan, widths[2:])
        returned = _piece(plan, widths) + _piece_for_products(plan, again_for_weights)
        forward, backward = (slices_sent(plan, ranks, rank, size) for size in (once, returned))
        formulas = "(n-1)/n N r s", "(n-1)/n N (r + u) s"
    else:
        forward = (0, 0)
        size = DTYPE_BYTES[plan.mathematics.precision.parameters]
        elements = (plan.local_tokens * width for width in widths)
        backward = sums_sent(plan, ranks, rank, elements, size)
        formulas = "0", "2 (n-1)/n N r s"
    yield from pass_terms(
        Axis.TP,
        "latent vectors",
        _SOURCE,
        counts=(blocks, again),
        each=(forward, backward),
        formulas=formulas,
    )


def narrow_widths(model: ModelShape, latent: LatentAttention) -> tuple[int, int, int]:
    """Return the widths that heads come out of: of queries, of keys with values, and shared."""
    queries = model.hidden if latent.query_rank is None else latent.query_rank
    return queries, latent.kv_rank, latent.rope_dim


def _piece(plan: Plan, widths: tuple[int, ...]) -> int:
    """Return the bytes of this rank's rows of these widths."""
    return sum(_rows_bytes(plan, width) // plan.mesh.tp for width in widths)


def _piece_for_products(plan: Plan, widths: tuple[int, ...]) -> int:
    """Return the bytes of this rank's rows of these widths as a product reads them."""
    precision = plan.mathematics.precision
    if not precision.is_fp8:
        return _piece(plan, widths)
    rows = plan.local_tokens // plan.mesh.tp
    return sum(rows * width + fp8_scale_bytes(rows * width, precision) for width in widths)


def _rows_bytes(plan: Plan, width: int) -> int:
    return plan.local_tokens * width * DTYPE_BYTES[plan.mathematics.precision.parameters]


def normed_together(model: ModelShape) -> bool:
    """Return whether queries and keys are normed over all heads together."""
    return model.qk_norm and model.qk_norm_over == "width"


def width_norm_bytes(plan: Plan, part: RankPart, rank: int) -> Iterator[SentTerm]:
    """Yield the terms of norms over all heads together, two numbers of each token.

    Those of queries and of keys travel together forward, one after the other backward.
    """
    if not normed_together(plan.model):
        return
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    ranks, tokens = plan.mesh.group(rank, Axis.TP), plan.local_tokens
    size = max(WIDE_BYTES, size)
    redoes = plan.layout.recompute.redoes
    yield from pass_terms(
        Axis.TP,
        "norms of all heads",
        "OLMo 2, 2024, section 2.2, split by heads",
        counts=(
            sum(one.microbatches * len(one.blocks) for one in part.stages),
            sum(
                one.microbatches * sum(redoes("attention", block) for block in one.blocks)
                for one in part.stages
            ),
        ),
        each=(
            sums_sent(plan, ranks, rank, (2 * tokens,), size),
            sums_sent(plan, ranks, rank, (tokens, tokens), size),
        ),
        formulas=("2 (n-1)/n 2 N max(4, s)", "2 (n-1)/n 2 N max(4, s)"),
    )


def parameter_gather_tiers(plan: Plan, rank: int) -> tuple[int, int]:
    """Return what a rank sends in a step to gather parameters: inside of its node, and beyond."""
    part = part_of(plan, rank)
    terms = data_bytes(plan, part, plan_buckets(plan, part), rank)
    return _tiers(term for term in terms if term.name.startswith(GATHERED))


def _tiers(terms: Iterable[SentTerm]) -> tuple[int, int]:
    near = far = 0
    for term in terms:
        beyond = term.far_bytes or 0
        near, far = near + term.bytes - beyond, far + beyond
    return near, far
