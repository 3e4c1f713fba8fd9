# SPDX-License-Identifier: Apache-2.0
"""Which parameters a rank holds, how often one microbatch uses each, and which rule updates them.

A pipeline rank holds one stage or several: virtual stages, the two arms of a V, or, where
microbatches cross the pipeline both ways (DualPipe), a stage and its mirror.

Bytes and seconds of blocks with one kind of attention are those of a plan with that kind alone
(`plan_of_layer`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import TypeAlias

from echelon.core.axis import Axis
from echelon.core.choices.lora import WHOLE_LINEARS
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.model_shape import ModelShape, of_layer_kind
from echelon.core.parameters import (
    EMBEDDING,
    LOGIT_BIAS,
    ROUTER,
    ParameterSpec,
    is_adapter,
    parameters,
)
from echelon.core.plan import Layout, Optimizer, OptimizerKind, Plan
from echelon.schedule.from_plan import num_microbatches_on_stage, stage_placement_from_plan

QK_NORMS = (".q_norm.weight", ".k_norm.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """Name the part of a model that one pipeline stage is; `microbatches` cross it on this rank."""

    stage: int
    blocks: tuple[int, ...]
    first: bool
    last: bool
    microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """Name the part of a model that one pipeline rank holds: its stages in forward order.

    Where `mirrored`, another rank of the pipeline holds a copy of the same stages. (The middle one
    of an odd number of ranks is its own mirror.) `expert_index` is which of the `ep` shares of the
    experts it holds: all shares are of one size.
    """

    pp_rank: int
    stages: tuple[StagePart, ...]
    mirrored: bool
    expert_index: int = 0

    @property
    def blocks(self) -> tuple[int, ...]:
        """Return the blocks of all stages."""
        return tuple(block for stage in self.stages for block in stage.blocks)

    @property
    def first(self) -> bool:
        """Return whether the model begins on this rank."""
        return any(stage.first for stage in self.stages)

    @property
    def last(self) -> bool:
        """Return whether the model ends on this rank."""
        return any(stage.last for stage in self.stages)

    def passes(self, stages: tuple[int, ...]) -> int:
        """Return how often a step runs `stages` of this rank: their microbatches together."""
        return sum(part.microbatches for part in self.stages if part.stage in stages)


def rank_part(plan: Plan, pp_rank: int, expert_index: int = 0) -> RankPart:
    """Return what pipeline rank `pp_rank` holds, with share `expert_index` of the experts."""
    placement, stages = stage_placement_from_plan(plan), plan.layout.pipeline.stages
    return RankPart(
        pp_rank=pp_rank,
        stages=tuple(
            StagePart(
                stage=stage,
                blocks=stages[stage],
                first=stage == 0,
                last=stage == len(stages) - 1,
                microbatches=num_microbatches_on_stage(plan, pp_rank, stage),
            )
            for stage in placement.stages_of(pp_rank)
        ),
        mirrored=bool(placement.mirrored) and 2 * pp_rank != plan.mesh.pp - 1,
        expert_index=expert_index,
    )


def part_of(plan: Plan, rank: int) -> RankPart:
    """Return what `rank` holds."""
    return rank_part(plan, pp_rank_of(plan, rank), expert_index_of(plan, rank))


def expert_index_of(plan: Plan, rank: int) -> int:
    """Return which share of the experts `rank` holds."""
    if plan.mesh.is_server(rank):
        return 0
    return plan.mesh.expert_index(rank, expert_tp=plan.layout.experts.expert_tp)


def held_experts(plan: Plan, part: RankPart) -> range | None:
    """Return the numbers of the routed experts of each layer that are here."""
    if plan.model.experts is None:
        return None
    share = plan.model.experts.num_experts // plan.mesh.ep
    return range(part.expert_index * share, (part.expert_index + 1) * share)


def pieces_of(plan: Plan, spec: ParameterSpec) -> int:
    """Return into how many pieces a parameter is cut where it has a dim to cut."""
    return plan.mesh.tp if spec.expert is None else plan.layout.experts.expert_tp


def pp_rank_of(plan: Plan, rank: int) -> int:
    """Return the place of `rank` in its pipeline; servers are beside a pipeline of one rank."""
    if plan.mesh.is_server(rank):
        return 0
    return plan.mesh.coordinates(rank)[Axis.PP]


def held_parameters(plan: Plan, part: RankPart) -> tuple[ParameterSpec, ...]:
    """Return the parameters of a rank in forward order, each once.

    An embedding that is the head, too, stands first where both are on this rank.
    """
    experts = held_experts(plan, part)
    found = {
        spec.name: spec for stage in part.stages for spec in stage_parameters(plan, stage, experts)
    }
    return tuple(found.values())


def stage_parameters(
    plan: Plan, part: StagePart, experts: range | None
) -> tuple[ParameterSpec, ...]:
    """Return the parameters of a stage in forward order, of routed experts those of `experts`.

    A tied embedding stands on the first stage and, as the head, on the last one too.
    """
    tied = plan.model.tied
    kept: list[ParameterSpec] = []
    for layer, specs in _held_by_layer(plan.model, experts):
        if layer is not None:
            wanted = layer in part.blocks
        elif specs[0].name == EMBEDDING:
            wanted = part.first or (part.last and tied)
        elif specs[0].name == "positions.weight":
            wanted = part.first
        else:
            wanted = part.last
        if wanted:
            kept += specs
    return tuple(kept)


_ByLayer: TypeAlias = "tuple[tuple[int | None, tuple[ParameterSpec, ...]], ...]"
"""Parameters of a model in forward order, those of a block together."""


@lru_cache(maxsize=64)
def _held_by_layer(model: ModelShape, experts: range | None) -> _ByLayer:
    """Return the parameters of a model, of routed experts those of `experts`.

    Kept for a few shares: of tens of thousands of parameters a rank may have a few hundred.
    """
    if experts is None:
        return _by_layer(model)
    return tuple(
        (layer, tuple(one for one in specs if one.expert is None or one.expert in experts))
        for layer, specs in _by_layer(model)
    )


@lru_cache(maxsize=8)
def _by_layer(model: ModelShape) -> _ByLayer:
    """Return the parameters of a model in forward order, those of a block together."""
    found: list[tuple[int | None, tuple[ParameterSpec, ...]]] = []
    for layer, specs in groupby(parameters(model), key=lambda spec: spec.layer):
        if layer is None:
            found += [(None, (spec,)) for spec in specs]
        else:
            found.append((layer, tuple(specs)))
    return tuple(found)


def partial_over_tensor(plan: Plan, spec: ParameterSpec) -> bool:
    """Return whether each tensor rank sees only a part of this replicated parameter's gradient.

    QK-norms are applied to the heads of a rank only; under sequence parallelism everything that
    acts on the residual stream (norms, output biases, positions) sees the tokens of a rank only;
    each tensor rank routes its own tokens. The matrix of an adapter that tensor ranks have whole
    meets the part of its layer's input or output that is here, unless its layer is whole, too.
    What is frozen has no gradient.
    """
    whole = spec.split_dim is None and spec.expert is None
    if plan.mesh.tp == 1 or spec.frozen or not whole:
        return False
    if is_adapter(spec.name):
        layer = spec.name.rsplit(".", 3)[1]
        return layer not in WHOLE_LINEARS or plan.layout.sequence_parallel
    if spec.name.endswith((ROUTER, LOGIT_BIAS)):
        return True
    # The norms of latent attention come before there are heads.
    per_head = plan.model.latent is None and spec.name.endswith(QK_NORMS)
    return per_head or plan.layout.sequence_parallel


def shared_by_ends(plan: Plan, part: RankPart, spec: ParameterSpec) -> bool:
    """Return whether this is a tied embedding that two ranks hold, one for each end of the model.

    Where one rank holds both ends, the embedding stands there once, and gets the gradients of both.
    """
    return (
        plan.model.tied and plan.mesh.pp > 1 and spec.name == EMBEDDING and part.first != part.last
    )


def update_rule_of(optimizer: Optimizer, spec: ParameterSpec) -> OptimizerKind:
    """Return the optimizer that updates a parameter.

    Some are for the matrices of blocks; embedding, head, norms and biases are another's then
    (Jordan et al., "Muon", 2024).
    """
    others = OPTIMIZERS[optimizer.kind].others
    is_matrix = spec.layer is not None and len(spec.shape) == 2
    return optimizer.kind if others is None or is_matrix else others


def decays(optimizer: Optimizer, spec: ParameterSpec) -> bool:
    """Return whether a parameter takes weight decay, by `optimizer.decay`."""
    if optimizer.decay == "all":
        return True
    matrix = len(spec.shape) > 1
    return matrix and (optimizer.decay == "matrices" or spec.layer is not None)


def with_rounding(plan: Plan, layout: Layout) -> Layout:
    """Return another layout of `plan` that gathers matrices in int8 if `plan` does.

    Only stage 3 gathers them; a layout of another stage would compute with unrounded matrices.
    """
    if not plan.mathematics.precision.int8_block:
        return layout
    stage = 0 if plan.model.experts is None else 3
    return replace(
        layout,
        zero=replace(layout.zero, stage=3, gather="int8"),
        experts=replace(layout.experts, zero_stage=stage),
    )


def plan_of_layer(plan: Plan, layer: int) -> Plan:
    """Return the plan of a model in which all blocks have the window of `layer`, or none."""
    model = of_layer_kind(plan.model, plan.model.layer_kind(layer))
    if model is plan.model:
        return plan
    return replace(plan, mathematics=replace(plan.mathematics, model=model))
