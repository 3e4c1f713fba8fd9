# SPDX-License-Identifier: Apache-2.0
"""The units of a stage (embedding, blocks, head) as the operators that they consist of.

In the letters of `cost/activations/numbers.py`. What both ends keep: the lookup of tokens, the last
norm and the input of the loss, which makes its logits in backward (`parallel/vocabulary.py`).

Source: Korthikanti et al., 2022, section 4.3 (input and output layers), for a loss that is split
over the vocabulary (Shoeybi et al., 2019, section 3).

Where operators of a block are made again in backward, such an operator keeps its input. Its output,
and what its backward needs, are there again from the backward of the linear layer that reads the
output (`parallel/recompute.py`) to its own:

    norm         drops its output and statistics       n D s + n w   made by the first layer
    activation   drops its output                      N F s         made by the last layer
    mlp          drops gate and up, and the same       N (up + 1) F s
    attention    drops turned queries and keys, the output and its log-sum-exp, and over context
                 ranks all keys; keeps the projections side by side, N (H + 2 K) h s

Where the MLP is made again, so is its norm, in one go. Source: Korthikanti et al., 2022, section 5,
for the operators of `parallel/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from echelon.core.model_shape import LayerKind
from echelon.core.plan import Plan
from echelon.cost.activations.attention import (
    ATTENTION,
    attention_branch,
    attention_operators,
    latent_operators,
)
from echelon.cost.activations.expert_numbers import expert_numbers
from echelon.cost.activations.experts import mixture_operators
from echelon.cost.activations.linear import (
    ATTENTION_DROPOUT,
    ATTENTION_IN,
    DOWN,
    MLP_IN,
    POST_NORMS,
    ResidualBranch,
    dropout_operator,
    mlp_branch,
    mlp_operators,
    mlp_sum_operator,
    norm_operator,
    post_norm_operator,
)
from echelon.cost.activations.numbers import (
    LOSS_ROWS,
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
from echelon.cost.bytes.terms import INDEX_BYTES, WIDE_BYTES
from echelon.layout.buckets import UNIT_EMBEDDING, UNIT_HEAD
from echelon.layout.expert_load import ExpertLoad
from echelon.layout.stage import StagePart

BOOL_BYTES = 1
NO_KINDS: Mapping[LayerKind, ActivationNumbers] = {}


def embedding_operators(x: ActivationNumbers) -> tuple[OperatorMemory, ...]:
    """Return the operators of the embedding; the stream that it makes is the first block's."""
    name, ids = "embedding", x.tokens * (INDEX_BYTES + BOOL_BYTES)
    gradient = (1 + elementwise_max(x.dropout, x.embedding_multiplied)) * x.stream
    rows = x.tokens * (INDEX_BYTES + x.hidden * x.size)
    # Where the vocabulary is split each rank has a copy, in which rows of others are zero.
    trains = 1 - x.frozen
    work = gradient + trains * (x.scattered * x.whole + x.shared * rows)
    places = ("positions", x.learned * x.rows * INDEX_BYTES, "n 8")
    waited = ("positions", trains * x.learned * x.rows * INDEX_BYTES, "n 8")
    waiting = ("gradients", trains * x.learned * x.shared * x.stream, "n D s")
    return (
        OperatorMemory(
            name=name,
            saved=saved_tensors(name, ("ids", ids, "N (8 + 1)")),
            kept_for_weight_gradient=saved_tensors(
                name, ("ids and gradients", trains * rows, "N (8 + D s)")
            ),
            forward=ids + x.whole + x.scattered * x.stream,
            backward=work + trains * x.mixed * x.tokens * x.hidden * WIDE_BYTES,
            backward_split=work,
        ),
        OperatorMemory(
            name="positions",
            saved=saved_tensors("positions", places),
            kept_for_weight_gradient=saved_tensors("positions", waited, waiting),
            forward=x.learned * (2 * places[1] + 3 * x.stream),
            backward=gradient + x.learned * x.mixed * x.rows * x.hidden * WIDE_BYTES,
            backward_split=gradient,
        ),
        dropout_operator(x, "embedding dropout", adds=0),
    )


def head_operators(x: ActivationNumbers) -> tuple[OperatorMemory, ...]:
    """Return the operators of the last norm and of the loss, which keeps its input alone.

    All else it makes in backward: logits of a chunk of tokens; over tensor ranks those of the chunk
    before wait for the collective of the next one. Where weight gradients wait for W, or add up in
    few digits, the chunk is all tokens.
    """
    saved = saved_tensors("loss", ("input", x.stream, "n D s"))
    return (
        norm_operator(x, "last norm"),
        OperatorMemory(
            name="loss",
            saved=saved,
            kept_for_weight_gradient=_loss_waiting(x),
            forward=total_saved_bytes(saved) + x.statistics_bytes,
            backward=loss_backward_bytes(x, split=False),
            backward_split=loss_backward_bytes(x, split=True),
        ),
    )


def loss_backward_bytes(x: ActivationNumbers, *, split: bool) -> Num:
    """Return the most that the loss has in backward beside its input; `split`: W waits."""
    part = -elementwise_max(-x.tokens, -LOSS_ROWS)
    if split:
        # A frozen head puts nothing off, so its logits come a part at a time here, too.
        rows = x.frozen * part + (1 - x.frozen) * x.tokens
        return _loss_backward(x, rows, 1, split=True)
    narrow = x.low_precision * (1 - x.mixed) * (1 - x.frozen)
    chunk = narrow * x.tokens + (1 - narrow) * part
    chunks = 1 + (1 - x.frozen) * x.shared * is_positive(x.tokens - chunk)
    return _loss_backward(x, chunk, chunks, split=False)


def loss_waiting_bytes(x: ActivationNumbers) -> Num:
    """Return what of the loss waits for W, where backward is split."""
    return total_saved_bytes(_loss_waiting(x))


def _loss_waiting(x: ActivationNumbers) -> tuple[SavedTensor, ...]:
    trains = 1 - x.frozen
    return saved_tensors(
        "loss",
        ("gradients of logits", trains * x.tokens * x.vocab * x.size, "N V s"),
        ("input, weighted", trains * x.whole, "N D s"),
    )


def _loss_backward(x: ActivationNumbers, rows: Num, chunks: Num, *, split: bool) -> Num:
    """Return the most that the loss has in backward beside its input, `rows` tokens at a time."""
    # Logits with a cap go by pieces in every dtype, and nothing is left to multiply by.
    by_pieces = elementwise_max(x.low_precision * (1 - x.fused_loss), x.capped_logits)
    wide = (1 - x.low_precision) * (1 - x.fused_loss) * (1 - x.capped_logits)
    numbers = x.tokens * (INDEX_BYTES + 2 * BOOL_BYTES + (3 + 3 * x.shared) * x.statistics_bytes)
    logits, stream = rows * x.vocab * x.size, rows * x.hidden * x.size
    width = x.capped_logits * x.statistics_bytes + (1 - x.capped_logits) * WIDE_BYTES
    piece_rows = x.chunk_rows(rows, x.vocab)
    row = by_pieces * x.vocab * width
    piece = piece_rows * row
    gathered = x.scattered * x.whole
    product = (1 - x.frozen) * (1 - split) * x.widened_bytes(x.vocab + x.hidden, rows)
    # The input times what is left to multiply lives as long as the logits of its chunk.
    two = chunks * logits + (chunks - 1) * wide * stream + elementwise_max(piece, product)
    # A piece of the gradient with its slopes, where there is a cap, and the piece before it.
    next_rows = -elementwise_max(-piece_rows, piece_rows - rows)
    with_slopes = 1 + x.capped_logits
    pieces = elementwise_max(with_slopes * piece, piece + with_slopes * next_rows * row)
    one = logits + elementwise_max(pieces, wide * stream)
    # The last chunk's product comes while dx is on its way; without a copy it has the whole input.
    last = logits + elementwise_max(wide * stream, (1 - wide) * gathered) + product
    running = elementwise_max(gathered + elementwise_max(one, two), x.scattered * x.stream + last)
    return numbers + x.whole + running


RankMicrobatch = tuple[int, int, ExpertLoad | None]
"""A rank, a microbatch, and how the rank's expert group was routed, where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOperators:
    """Hold the operators of a unit; `stored` is all that is kept of one that is recomputed.

    `on_host` says that it waits on the host, or what is kept on the device beside it.
    """

    name: str
    operators: tuple[OperatorMemory, ...]
    stored: SavedTensor | None = None
    on_host: bool = False

    @property
    def saved(self) -> tuple[SavedTensor, ...]:
        """Return what waits for backward on the device."""
        if self.stored is not None:
            return () if self.on_host else (self.stored,)
        return tuple(one for operator in self.operators for one in operator.saved)

    @property
    def kept_for_weight_gradient(self) -> tuple[SavedTensor, ...]:
        """Return what waits for W."""
        return tuple(one for each in self.operators for one in each.kept_for_weight_gradient)


def stage_unit_operators(
    plan: Plan,
    stage: StagePart,
    x: ActivationNumbers,
    place: RankMicrobatch,
    of_kinds: Mapping[LayerKind, ActivationNumbers] = NO_KINDS,
) -> tuple[UnitOperators, ...]:
    """Return the units of a stage in forward order.

    `of_kinds` are the numbers of blocks by their kind of attention, where there are several.
    """
    found: list[UnitOperators] = []
    if stage.first:
        found.append(UnitOperators(name=UNIT_EMBEDDING, operators=embedding_operators(x)))
    elif _input_alone(plan, stage, x):
        # The executor has the input of a stage whatever becomes of it inside.
        found.append(UnitOperators(name="input", operators=(), stored=_stream(x, "stage")))
    # Blocks of a kind are alike, unless routing is data.
    alike: dict[tuple[object, ...], tuple[OperatorMemory, ...]] = {}
    for layer in stage.blocks:
        name = f"layers.{layer}"
        routed = layer if place[2] is not None else -1
        attends = plan.model.layer_kind(layer)
        kind = (
            plan.model.layer_has_experts(layer),
            plan.layout.recompute.operators_of(layer),
            attends,
        )
        if (*kind, routed) not in alike:
            own = of_kinds.get(attends, x)
            alike[(*kind, routed)] = block_operators(plan, own, layer, place)
        recomputed = plan.layout.recompute.recomputes(layer)
        found.append(
            UnitOperators(
                name=name,
                operators=alike[(*kind, routed)],
                stored=_stream(x, name) if recomputed else None,
                on_host=recomputed and plan.layout.recompute.offload == "host",
            )
        )
    if stage.last:
        found.append(UnitOperators(name=UNIT_HEAD, operators=head_operators(x)))
    return tuple(found)


def block_operators(
    plan: Plan, x: ActivationNumbers, layer: int, place: RankMicrobatch
) -> tuple[OperatorMemory, ...]:
    """Return the operators of a block."""
    latent, operators = plan.model.latent, plan.layout.recompute.operators_of(layer)
    x = replace(x, projected=int("attention" in operators))
    attention = attention_operators(x) if latent is None else latent_operators(x, latent)
    if plan.model.layer_has_experts(layer):
        rank, microbatch, load = place
        mlp = mixture_operators(x, expert_numbers(plan, rank, (layer, microbatch), load))
    else:
        mlp = mlp_operators(x)
    after = [post_norm_operator(x, name) for name in POST_NORMS] if holds(x.norm_after) else []
    dropped = dropout_operator(x, ATTENTION_DROPOUT)
    found = (*attention, *after[:1], dropped, *mlp, *after[1:], mlp_sum_operator(x))
    own_norm = "norm" in operators and holds(x.norm_before) and not holds(x.one_norm)
    again = "mlp" in operators and not own_norm
    return remade_operators(x, with_frozen_inputs(x, found, mlp_again=again), operators)


def _input_alone(plan: Plan, stage: StagePart, x: ActivationNumbers) -> bool:
    """Return whether no operator on the device keeps the input of a stage."""
    if not stage.blocks:
        return not stage.last
    recompute = plan.layout.recompute
    if recompute.recomputes(stage.blocks[0]):
        return recompute.offload == "host"
    # Without a norm before it attention alone reads it, and keeps it where it learns.
    return not holds(elementwise_max(x.norm_before, x.learns(ATTENTION_IN)))


def _stream(x: ActivationNumbers, operator: str) -> SavedTensor:
    return SavedTensor(operator=operator, name="input", bytes=x.stream, formula="n D s")


_NORMS = {"attention norm": ("q, k, v", "q_down, kv_down"), "mlp norm": ("gate, up",)}
"""The first layers that read each norm, by its name."""

_LAST = {"attention norm": "o", "mlp norm": DOWN}
"""Until the last layer of a branch has run, what its first layers read is a variable."""


def remade_operators(
    x: ActivationNumbers, operators: Sequence[OperatorMemory], names: Set[str]
) -> tuple[OperatorMemory, ...]:
    """Return the operators of a block of which those called `names` are made again."""
    found = {one.name: one for one in operators}
    if "attention" in names and "heads" in found:
        _attention(x.of_attention, found)
    if "mlp" in names and DOWN in found:
        _mlp(x, found)
    elif "activation" in names and DOWN in found:
        _drop(found, DOWN, found[DOWN].saved, DOWN)
        _made_whole(found, DOWN, x.product_bytes(x.tokens * x.inner))
    if "norm" in names:
        # What two branches read is not made again.
        if "attention norm" in found and not holds(x.one_norm):
            _norm(x.of_attention, found, "attention norm", attention_branch(x))
        if DOWN in found and "mlp norm" in found:
            _norm(x, found, "mlp norm", mlp_branch(x))
    return tuple(found.values())


def _drop(
    found: dict[str, OperatorMemory], name: str, dropped: tuple[SavedTensor, ...], reader: str
) -> None:
    """Let `reader` make again what an operator kept."""
    one = found[name]
    kept = tuple(saved for saved in one.saved if saved not in dropped)
    found[name] = replace(one, saved=kept, remade=(*one.remade, *dropped), reader=reader)


def _made_whole(found: dict[str, OperatorMemory], name: str, size: Num) -> None:
    """Say that what was dropped last is made again whether its reader learns from it or not."""
    *others, last = found[name].remade
    found[name] = replace(found[name], remade=(*others, replace(last, bytes=size)))


def _attention(x: ActivationNumbers, found: dict[str, OperatorMemory]) -> None:
    """Keep the projections of attention alone; the gradient of its output lives as it does."""
    _drop(found, "heads", found["heads"].saved[1:], "o")
    _drop(found, ATTENTION, found[ATTENTION].saved, "o")
    _drop(found, "o", found["o"].saved, "o")
    heads, core, output = found["heads"], found[ATTENTION], found["o"]
    work = elementwise_max(
        heads.forward - heads.saved_bytes, total_saved_bytes(heads.remade) + core.forward
    )
    found["heads"] = replace(
        heads, backward=heads.backward + x.queries, backward_split=heads.backward_split + x.queries
    )
    found["o"] = replace(
        output,
        forward=x.queries + x.summed_bytes(x.whole),
        again=x.around + x.apart * x.stream + work,
    )


def _mlp(x: ActivationNumbers, found: dict[str, OperatorMemory]) -> None:
    """Keep the input of an MLP alone; the gradient of what is inside of it lives as it does."""
    _drop(found, DOWN, found[DOWN].saved, DOWN)
    _made_whole(found, DOWN, x.product_bytes(x.tokens * x.inner))
    _drop(found, "activation", found["activation"].saved, DOWN)
    inner, branch = x.tokens * x.inner * x.size, mlp_branch(x)
    columns, activation, down = found["gate, up"], found["activation"], found[DOWN]
    work = elementwise_max(columns.forward - columns.saved_bytes, activation.forward) - branch.local
    found["gate, up"] = replace(
        columns, backward=columns.backward + inner, backward_split=columns.backward_split + inner
    )
    found[DOWN] = replace(down, again=(1 + x.apart) * x.stream + work)


def _norm(
    x: ActivationNumbers, found: dict[str, OperatorMemory], name: str, branch: ResidualBranch
) -> None:
    """Keep the input of a norm alone; what it makes is a variable of the forward pass."""
    norm, last = found[name], found[_LAST[name]]
    (first,) = (one for one in _NORMS[name] if one in found)
    made: Num = found[first].forward - x.stream - x.gathered_bytes(x.whole) - branch.local
    statistics = norm.saved[-1]
    work = norm.forward - branch.local - x.stream * (len(norm.saved) - 1)
    reader = DOWN if found.get("activation", norm).remade and name == "mlp norm" else first
    if reader == first:
        beside = x.stream + branch.row_layer_bytes(x) + made
        found[first] = replace(found[first], again=beside + work)
    else:
        # Norm and layer are made again one after the other, the statistics kept.
        again = elementwise_max(last.again + statistics.bytes + x.stream, x.stream + work)
        found[last.name] = replace(last, again=again)
    _drop(found, first, found[first].saved[:1], reader)
    _made_whole(found, first, x.matmul_stream)
    _drop(found, name, (statistics,), reader)
    after = list(found)
    until = after.index(last.name) + 1
    until += after[until : until + 1] in ([name] for name in POST_NORMS)
    for one in after[after.index(first) + 1 : until]:
        # Where no layer keeps it, it is one anyway.
        beside = x.learns(branch.groups[0]) * x.stream
        found[one] = replace(found[one], forward=found[one].forward + beside)


def with_frozen_inputs(
    x: ActivationNumbers, operators: tuple[OperatorMemory, ...], *, mlp_again: bool
) -> tuple[OperatorMemory, ...]:
    """Return the operators of a block, where what no layer keeps is a variable that lives on.

    What attention reads lives until the MLP has an input of its own, that until the block is over.
    Without a norm the former is the input of the block, which its caller has. `mlp_again`: an MLP
    that is made again from its input keeps that.
    """
    lost = [(1 - x.learns(group)) * x.stream for group in (ATTENTION_IN, MLP_IN)]
    lost[1] = (1 - x.one_norm * x.learns(ATTENTION_IN)) * lost[1]
    if mlp_again:
        operators = tuple(
            replace(one, saved=(_more(one.saved[0], lost[1]),)) if one.name == "gate, up" else one
            for one in operators
        )
        lost[1] = 0 * x.stream
    beside, found = 0 * x.stream, list[OperatorMemory]()
    for one in operators:
        if one.name == "gate, up":
            beside = (1 - x.norm_before) * lost[0]
        found.append(replace(one, forward=one.forward + beside))
        if one.name == "q, k, v":
            beside = lost[0]
        elif one.name == "gate, up":
            beside = beside + lost[1]
    return tuple(found)


def _more(saved: SavedTensor, size: Num) -> SavedTensor:
    return replace(saved, bytes=saved.bytes + size)
