"""The units of a stage (embedding, blocks, head) as the operators that they consist of."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.plan import Plan
from echelon.cost.activation_numbers import ActivationNumbers, Operator, Saved
from echelon.cost.activations_attention import attention_operators
from echelon.cost.activations_ends import embedding_operators, head_operators
from echelon.cost.activations_experts import mixture_operators
from echelon.cost.activations_latent import latent_operators
from echelon.cost.activations_linear import (
    ATTENTION_DROPOUT,
    MLP_DROPOUT,
    dropout,
    mlp_operators,
)
from echelon.cost.buckets import UNIT_EMBEDDING, UNIT_HEAD
from echelon.cost.expert_load import ExpertLoad
from echelon.cost.expert_numbers import expert_numbers
from echelon.cost.stage import StagePart

Place = tuple[int, int, ExpertLoad | None]
"""A rank, a microbatch, and how the rank's expert group was routed, where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Hold the operators of a unit; `stored` is all that is kept of one that is recomputed.

    `on_host` says that it waits on the host, or what is kept on the device beside it.
    """

    name: str
    operators: tuple[Operator, ...]
    stored: Saved | None = None
    on_host: bool = False

    @property
    def saved(self) -> tuple[Saved, ...]:
        """Return what waits for backward on the device."""
        if self.stored is not None:
            return () if self.on_host else (self.stored,)
        return tuple(one for operator in self.operators for one in operator.saved)

    @property
    def waits(self) -> tuple[Saved, ...]:
        """Return what waits for W."""
        return tuple(one for operator in self.operators for one in operator.waits)


def stage_units(
    plan: Plan, stage: StagePart, x: ActivationNumbers, place: Place
) -> tuple[Unit, ...]:
    """Return the units of a stage in forward order."""
    found: list[Unit] = []
    if stage.first:
        found.append(Unit(name=UNIT_EMBEDDING, operators=embedding_operators(x)))
    elif _input_alone(plan, stage):
        # The executor has the input of a stage whatever becomes of it inside.
        found.append(Unit(name="input", operators=(), stored=_stream(x, "stage")))
    for layer in stage.blocks:
        name = f"layers.{layer}"
        recomputed = plan.layout.recompute.recomputes(layer)
        found.append(
            Unit(
                name=name,
                operators=block_operators(plan, x, layer, place),
                stored=_stream(x, name) if recomputed else None,
                on_host=recomputed and plan.layout.recompute.offload == "host",
            )
        )
    if stage.last:
        found.append(Unit(name=UNIT_HEAD, operators=head_operators(x)))
    return tuple(found)


def block_operators(
    plan: Plan, x: ActivationNumbers, layer: int, place: Place
) -> tuple[Operator, ...]:
    """Return the operators of a block."""
    latent = plan.model.latent
    attention = attention_operators(x) if latent is None else latent_operators(x, latent)
    if plan.model.layer_has_experts(layer):
        rank, microbatch, load = place
        mlp = mixture_operators(x, expert_numbers(plan, rank, (layer, microbatch), load))
    else:
        mlp = mlp_operators(x)
    return (*attention, dropout(x, ATTENTION_DROPOUT), *mlp, dropout(x, MLP_DROPOUT))


def _input_alone(plan: Plan, stage: StagePart) -> bool:
    """Return whether no operator on the device keeps the input of a stage."""
    if not stage.blocks:
        return not stage.last
    recompute = plan.layout.recompute
    return recompute.recomputes(stage.blocks[0]) and recompute.offload == "host"


def _stream(x: ActivationNumbers, operator: str) -> Saved:
    return Saved(operator=operator, name="input", bytes=x.stream, formula="n D s")
