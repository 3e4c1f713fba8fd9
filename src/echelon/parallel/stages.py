"""The decoders of the stages that one rank holds, without memory for their parameters yet."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from echelon.core.plan import Plan
from echelon.cost.stage import RankPart, held_experts
from echelon.models.decoder import Decoder
from echelon.models.modules import Share
from echelon.parallel.operations import RankOperations
from echelon.parallel.recompute import block_runner


def empty_stages(plan: Plan, part: RankPart, operations: RankOperations) -> dict[int, Decoder]:
    """Return the stages of a rank on the meta device, each with its policy of recompute."""
    share = Share(
        tp=plan.mesh.tp, expert_tp=plan.layout.experts.expert_tp, experts=held_experts(plan, part)
    )
    stages: dict[int, Decoder] = {}
    for one in part.stages:
        with torch.device("meta"):
            stages[one.stage] = Decoder(
                plan.model,
                operations=operations,
                blocks=one.blocks,
                first=one.first,
                last=one.last,
                share=share,
            )
        stages[one.stage].run_block = block_runner(plan.layout.recompute)
    return stages


def named_parameters(stages: Mapping[int, Decoder]) -> dict[str, nn.Parameter]:
    """Return one parameter of each name: a tied embedding may be in two stages of a rank."""
    return {name: one for stage in stages.values() for name, one in stage.named_parameters()}
