# SPDX-License-Identifier: Apache-2.0
"""The order in which a plan is applied to a model on one rank.

tensor / sequence -> context -> experts -> pipeline stage -> recompute -> data / ZeRO.
"""

from __future__ import annotations

import torch

from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.plan import Plan
from echelon.cost.bytes.transient import parameter_buffers
from echelon.layout.stage import held_parameters, part_of
from echelon.models.precision import TORCH_DTYPES
from echelon.parallel.context import ContextAttention
from echelon.parallel.data import bucket_rule
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.expert import expert_parallel
from echelon.parallel.operations import RankOperations
from echelon.parallel.pipeline import PipelineExecutor, StreamShape
from echelon.parallel.rank_model import GradientExchange, RankModel, empty_stages, named_parameters
from echelon.parallel.storage.buckets import make_buckets
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.storage.weights import fill_initial, install, stored_values
from echelon.parallel.tensor import tensor_split
from echelon.parallel.zero import make_parameter_store


def apply_plan(
    plan: Plan,
    groups: RankGroups,
    device: torch.device,
    *,
    pieces: PieceSizes = TRAINING_PIECES,
    initial: bool = True,
    exchange: GradientExchange | None = None,
) -> RankModel:
    """Build this rank's part of the plan's model, with `initial` weights or with zeros."""
    zero, part = plan.layout.zero, part_of(plan, groups.rank)
    specs = held_parameters(plan, part)
    exchange = exchange or GradientExchange()
    reduction = exchange.reduction(plan, groups)
    store = GradientStore(reduction, pieces)
    split = tensor_split(plan, groups.tensor, store, device, pieces)
    context = ContextAttention(plan, groups.ring, groups.ulysses, store, pieces=pieces)
    experts = expert_parallel(plan, part, groups, split, device)
    operations = RankOperations(split, plan.model.vocab, context, experts=experts)
    stages = empty_stages(plan, part, operations, groups.completion)
    operations.learn(stages.values())
    count = parameter_buffers(plan, part.pp_rank)
    offload_store = make_parameter_store(zero, groups, device, num_buffers=count, pieces=pieces)
    rule = bucket_rule(plan, part, specs, groups, offload_store, device)
    like = torch.empty(0, dtype=TORCH_DTYPES[plan.mathematics.precision.parameters], device=device)
    buckets = make_buckets(named_parameters(stages), specs, rule, like)
    install(stages.values(), buckets)
    if initial:
        fill_initial(buckets, [*map(stored_values, buckets)], plan, groups, device, pieces)
    store.hold(buckets)
    operations.gatherer = exchange.gathering(plan, part, buckets, groups, pieces)
    executor = PipelineExecutor(
        stages,
        pp_rank=part.pp_rank,
        groups=groups,
        store=store,
        stream=StreamShape.from_plan(plan, like, scattered=split.scattered),
    )
    return RankModel(
        stages=stages,
        buckets=buckets,
        store=store,
        reduction=reduction,
        gathering=operations.gatherer,
        parameter_store=offload_store,
        executor=executor,
    )
