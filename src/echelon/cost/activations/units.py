"""The units of a stage (embedding, blocks, head) as the operators that they consist of.

In the letters of `cost/activations/numbers.py`. What both ends keep: the lookup of tokens, the last
norm, logits and loss. The logits of a rank, [N, V], wait for backward in the dtype of the
parameters; of the softmax only numbers for each token are kept beside them
(`parallel/vocabulary.py`).

Source: Korthikanti et al., 2022, section 4.3 (input and output layers), for a loss that is split
over the vocabulary (Shoeybi et al., 2019, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.core.plan import Plan
from echelon.cost.activations.attention import attention_operators
from echelon.cost.activations.expert_numbers import expert_numbers
from echelon.cost.activations.experts import mixture_operators
from echelon.cost.activations.latent import latent_operators
from echelon.cost.activations.linear import (
    ATTENTION_DROPOUT,
    MLP_DROPOUT,
    dropout_operator,
    mlp_operators,
    norm_operator,
)
from echelon.cost.activations.numbers import (
    INDEX_BYTES,
    STATISTICS_BYTES,
    ActivationNumbers,
    OperatorMemory,
    SavedTensor,
    elementwise_max,
    saved_tensors,
    total_saved_bytes,
)
from echelon.cost.activations.remade import remade_operators
from echelon.layout.buckets import UNIT_EMBEDDING, UNIT_HEAD
from echelon.layout.expert_load import ExpertLoad
from echelon.layout.stage import StagePart

BOOL_BYTES = 1


def embedding_operators(x: ActivationNumbers) -> tuple[OperatorMemory, ...]:
    """Return the operators of the embedding; the stream that it makes is the first block's."""
    name, ids = "embedding", x.tokens * (INDEX_BYTES + BOOL_BYTES)
    gradient = (1 + x.dropout) * x.stream
    rows = x.found * (INDEX_BYTES + x.hidden * x.size)
    # Where the vocabulary is split each rank has the gradients of the rows that it looked up.
    work = gradient + x.scattered * x.whole + x.shared * rows
    places = ("positions", x.learned * x.rows * INDEX_BYTES, "n 8")
    waiting = ("gradients", x.learned * x.shared * x.stream, "n D s")
    return (
        OperatorMemory(
            name=name,
            saved=saved_tensors(name, ("ids", ids, "N (8 + 1)")),
            kept_for_weight_gradient=saved_tensors(
                name, ("ids and gradients", rows, "N' (8 + D s)")
            ),
            forward=ids + x.whole + x.scattered * x.stream,
            backward=work + x.mixed * x.found * x.hidden * STATISTICS_BYTES,
            backward_split=work,
        ),
        OperatorMemory(
            name="positions",
            saved=saved_tensors("positions", places),
            kept_for_weight_gradient=saved_tensors("positions", places, waiting),
            forward=x.learned * (2 * places[1] + 3 * x.stream),
            backward=gradient + x.learned * x.mixed * x.rows * x.hidden * STATISTICS_BYTES,
            backward_split=gradient,
        ),
        dropout_operator(x, "embedding dropout", adds=0),
    )


def head_operators(x: ActivationNumbers) -> tuple[OperatorMemory, ...]:
    """Return the operators of the last norm and of the loss."""
    numbers = x.tokens * (2 * x.statistics_bytes + INDEX_BYTES + BOOL_BYTES)
    logits = ("logits", x.tokens * x.vocab * x.size, "N V s")
    saved = saved_tensors(
        "loss",
        ("input", x.whole, "N D s"),
        logits,
        ("numbers of tokens", numbers, "N (2 w + 8 + 1)"),
    )
    widened = x.low_precision * x.chunk_rows(x.tokens, x.vocab) * x.vocab * STATISTICS_BYTES
    statistics = (6 + 3 * x.shared * x.tp) * x.tokens * x.statistics_bytes
    work = (2 - x.low_precision) * x.whole + x.scattered * x.stream + x.tokens * x.statistics_bytes
    product = x.mixed * x.vocab * x.hidden * x.size
    return (
        norm_operator(x, "last norm"),
        OperatorMemory(
            name="loss",
            saved=saved,
            kept_for_weight_gradient=saved_tensors(
                "loss", logits, ("input, weighted", x.whole, "N D s")
            ),
            forward=total_saved_bytes(saved) + statistics + x.scattered * x.stream + widened,
            backward=elementwise_max(work + product, widened),
            backward_split=elementwise_max(work, widened),
        ),
    )


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
    plan: Plan, stage: StagePart, x: ActivationNumbers, place: RankMicrobatch
) -> tuple[UnitOperators, ...]:
    """Return the units of a stage in forward order."""
    found: list[UnitOperators] = []
    if stage.first:
        found.append(UnitOperators(name=UNIT_EMBEDDING, operators=embedding_operators(x)))
    elif _input_alone(plan, stage):
        # The executor has the input of a stage whatever becomes of it inside.
        found.append(UnitOperators(name="input", operators=(), stored=_stream(x, "stage")))
    for layer in stage.blocks:
        name = f"layers.{layer}"
        recomputed = plan.layout.recompute.recomputes(layer)
        found.append(
            UnitOperators(
                name=name,
                operators=block_operators(plan, x, layer, place),
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
    dropped = dropout_operator(x, ATTENTION_DROPOUT)
    found = (*attention, dropped, *mlp, dropout_operator(x, MLP_DROPOUT))
    return remade_operators(x, found, operators)


def _input_alone(plan: Plan, stage: StagePart) -> bool:
    """Return whether no operator on the device keeps the input of a stage."""
    if not stage.blocks:
        return not stage.last
    recompute = plan.layout.recompute
    return recompute.recomputes(stage.blocks[0]) and recompute.offload == "host"


def _stream(x: ActivationNumbers, operator: str) -> SavedTensor:
    return SavedTensor(operator=operator, name="input", bytes=x.stream, formula="n D s")
