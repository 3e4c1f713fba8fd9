"""The order in which a plan is applied to a model on one rank.

tensor / sequence -> pipeline stage -> recompute -> data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.stage import stage_of_rank, stage_parameters, stage_part
from echelon.models.decoder import Decoder
from echelon.parallel.buckets import Bucket, make_buckets
from echelon.parallel.data import GradientReduction, bucket_rule
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.gradients import GradientStore
from echelon.parallel.operations import RankOperations
from echelon.parallel.pipeline import PipelineExecutor, PipeLinks
from echelon.parallel.recompute import block_runner
from echelon.parallel.tensor import TensorSplit
from echelon.parallel.weights import fill_initial, materialise

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """Hold the part of the model that one rank trains, and what runs and reduces it."""

    stage: Decoder
    buckets: list[Bucket]
    store: GradientStore
    reduction: GradientReduction
    executor: PipelineExecutor


def apply_plan(plan: Plan, groups: RankGroups, device: torch.device) -> RankModel:
    """Build this rank's part of the plan's model, with its initial weights."""
    part = stage_part(plan, stage_of_rank(plan, groups.rank))
    specs = stage_parameters(plan, part)
    reduction = GradientReduction()
    store = GradientStore(reduction.bucket_is_full)
    split = TensorSplit(
        group=groups.tensor, sequence_parallel=plan.layout.sequence_parallel, store=store
    )
    with torch.device("meta"):
        stage = Decoder(
            plan.model,
            operations=RankOperations(split, plan.model.vocab),
            blocks=part.blocks,
            first=part.first,
            last=part.last,
            tp=plan.mesh.tp,
        )
    stage.run_block = block_runner(plan.layout.recompute)
    materialise(stage, device, DTYPES[plan.mathematics.precision.parameters])
    fill_initial(stage, plan, specs, groups.tensor)
    rule = bucket_rule(plan, part, specs, groups)
    buckets = make_buckets(dict(stage.named_parameters()), specs, rule)
    store.hold(buckets)
    executor = PipelineExecutor(
        {part.stage: stage},
        pp_rank=plan.mesh.coordinates(groups.rank)[Axis.PP],
        links=PipeLinks(forward=groups.pipe_forward, backward=groups.pipe_backward),
        store=store,
        recorder=groups.recorder,
        rows_divisor=plan.mesh.tp if split.scattered else 1,
    )
    return RankModel(
        stage=stage, buckets=buckets, store=store, reduction=reduction, executor=executor
    )
