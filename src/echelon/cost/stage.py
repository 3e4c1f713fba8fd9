"""Which parameters a rank holds, and how often one microbatch uses each of them."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.axis import Axis
from echelon.core.parameters import EMBEDDING, ParameterSpec, parameters
from echelon.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """Name the part of a model that one pipeline stage owns."""

    stage: int
    blocks: tuple[int, ...]
    first: bool
    last: bool


def stage_part(plan: Plan, stage: int) -> StagePart:
    """Return what stage `stage` owns: its blocks, and the ends of the model."""
    stages = plan.layout.pipeline.stages
    return StagePart(
        stage=stage,
        blocks=stages[stage],
        first=stage == 0,
        last=stage == len(stages) - 1,
    )


def stage_of_rank(plan: Plan, rank: int) -> int:
    """Return the pipeline stage that lives on `rank` (one stage per pipeline rank)."""
    return plan.mesh.coordinates(rank)[Axis.PP]


def stage_parameters(plan: Plan, part: StagePart) -> tuple[ParameterSpec, ...]:
    """Return the parameters of a stage in forward order.

    A tied embedding stands on the first stage and, as the head, on the last one too.
    """
    tied = plan.model.tied
    kept: list[ParameterSpec] = []
    for spec in parameters(plan.model):
        if spec.layer is not None:
            wanted = spec.layer in part.blocks
        elif spec.name == EMBEDDING:
            wanted = part.first or (part.last and tied)
        elif spec.name == "positions.weight":
            wanted = part.first
        else:
            wanted = part.last
        if wanted:
            kept.append(spec)
    return tuple(kept)


def partial_over_tensor(plan: Plan, spec: ParameterSpec) -> bool:
    """Return whether each tensor rank sees only a part of this replicated parameter's gradient.

    QK-norms are applied to the heads of a rank only; under sequence parallelism everything that
    acts on the residual stream (norms, output biases, positions) sees the tokens of a rank only.
    """
    if plan.mesh.tp == 1 or spec.split_dim is not None:
        return False
    per_head = spec.name.endswith((".q_norm.weight", ".k_norm.weight"))
    return per_head or plan.layout.sequence_parallel


def shared_by_ends(plan: Plan, part: StagePart, spec: ParameterSpec) -> bool:
    """Return whether this is a tied embedding that two different stages hold."""
    return (
        plan.model.tied
        and plan.mesh.pp > 1
        and spec.name == EMBEDDING
        and (part.first or part.last)
    )
