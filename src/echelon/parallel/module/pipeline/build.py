# SPDX-License-Identifier: Apache-2.0
"""The order in which a pipeline is made of a module on one rank.

follow its forward -> which stage uses what -> check each stage alone -> cut sequences -> buckets
of own stages -> parameters of others away -> weight gradients put off -> executor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from echelon.core.errors import ConfigError, InfeasiblePlan
from echelon.core.event import EventSink, NoEvents
from echelon.core.plan import Plan
from echelon.core.rulebook.module import (
    MODULE_PARAMETERS,
    MODULE_SETTINGS,
    MODULE_SHARED,
    MODULE_SPLIT,
)
from echelon.layout.module_buckets import ROOT
from echelon.layout.modules.stages import StagedParameter, plan_stage_buckets
from echelon.layout.stage import RankPart, part_of
from echelon.models.precision import TORCH_DTYPES
from echelon.parallel.data import GradientReduction
from echelon.parallel.gradients import GradientStore
from echelon.parallel.module.context.build import apply_context
from echelon.parallel.module.context.sequences import SequenceCut
from echelon.parallel.module.forwards.linear import layers_of
from echelon.parallel.module.forwards.norms import shorten_norms
from echelon.parallel.module.loss import Batch, ModuleLoss
from echelon.parallel.module.module import (
    RankModule,
    buckets_of,
    cast_rest,
    described_parameters,
    frozen_buckets,
    is_split,
    mark_split,
    masters_of,
)
from echelon.parallel.module.pipeline.chain import BlockChain, find_blocks
from echelon.parallel.module.pipeline.check import (
    check_same_on_ranks,
    check_stages,
    stages_of_parameters,
)
from echelon.parallel.module.pipeline.linear import defer_weights
from echelon.parallel.module.pipeline.passes import (
    ActionWatch,
    StageGathering,
    StageHooks,
    StagePasses,
)
from echelon.parallel.module.pipeline.stage import ModuleStage, ModuleStream, Window, hide
from echelon.parallel.module.pipeline.trace import follow, leaving_no_trace
from echelon.parallel.module.split_loss import over_vocabulary
from echelon.parallel.module.start import (
    agree_on_module,
    check_plan,
    check_ranks,
    managed_parameters,
    share_values,
)
from echelon.parallel.module.tensor.apply import NO_RULES, TensorChoice, apply_split, choose_split
from echelon.parallel.pipeline import PipelineExecutor
from echelon.parallel.transport.device_mesh import RankGroups, rank_groups
from echelon.parallel.transport.recorder import Recorder
from echelon.schedule.action import Schedule
from echelon.schedule.from_plan import schedule_from_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineModule:
    """Hold the stages of a module that one rank trains, and what runs them."""

    module: RankModule
    """What is trained here, and what reduces and gathers it."""
    loss: ModuleLoss
    """What is added up."""
    executor: PipelineExecutor
    """What runs microbatches, in the order of a schedule."""
    stream: ModuleStream
    """The shape of what travels."""
    schedule: Schedule
    """The schedule of a step."""
    sequences: SequenceCut | None
    """What cuts the sequences of a microbatch, where there are context ranks."""

    def begin_step(self) -> None:
        """Begin the one backward of a step."""
        cast("StagePasses", self.module.passes).begin_step()


def apply_pipeline(  # noqa: PLR0913 - each is one choice of the caller, by its name
    plan: Plan,
    model: nn.Module,
    *,
    split: str,
    loss: ModuleLoss,
    example: Batch,
    ignore: Sequence[str] = (),
    tensor: TensorChoice = NO_RULES,
    sink: EventSink | None = None,
) -> PipelineModule:
    """Cut `model` into the stages of `plan`; every rank of the mesh does so together."""
    check_plan(plan, cuts=("pp", "cp"))
    _check_offload(plan)
    if is_split(model):
        raise ConfigError(MODULE_PARAMETERS.problem("this module has been split already"))
    cut = choose_split(plan, model, tensor, list(find_blocks(model, split)))
    rank = check_ranks(plan)
    named = managed_parameters(model, ignore)
    chain = BlockChain(model, split, guarded=True)
    _check_layers(plan, chain, split)
    part, schedule = part_of(plan, rank), schedule_from_plan(plan)
    windows = _windows(plan, part)
    with leaving_no_trace(model):
        at = frozenset(end for one in windows for end in (one.start, one.stop))
        trace = follow(model, chain, loss, example, at=at)
        stages_of = stages_of_parameters(chain, trace, named, plan.layout.pipeline.stages)
        stages = {one.stage: ModuleStage(model, chain, loss, one) for one in windows}
        check_stages(named, stages.values(), trace, stages_of)
    groups = rank_groups(_as_tied(plan, named, stages_of), Recorder(rank, sink or NoEvents()))
    agree_on_module(model, named, plan, groups.world)
    share_values(named, groups.world)
    check_same_on_ranks(plan, model, chain, loss, example, groups.world)
    link = apply_split(model, cut, named, groups.tensor)
    shorten_norms(layers_of(model, named.values()))
    described = [
        StagedParameter(parameter=one, stages=stages_of[one.spec.name])
        for one in described_parameters(model, named, chain.blocks, cut.split)
    ]
    _check_shared(described)
    context = None
    if plan.mesh.cp > 1:
        context = apply_context(model, plan, groups, loss=loss, example=example, chain=chain)
    own = {name for name in named if set(stages_of[name]) & {one.stage for one in windows}}
    foreign = {name: one for name, one in named.items() if name not in own}
    hide(foreign, TORCH_DTYPES[plan.mathematics.precision.parameters])
    owners = _owners(plan, stages_of, schedule)
    module = _rank_module(
        plan, model, [*chain.names, ROOT], described=described, named=named, own=own, groups=groups
    )
    module = replace(module, foreign=foreign, owners=owners, split=cut.split, link=link)
    store = cast("StagePasses", module.passes).store
    _defer(model, named, store, own)
    loss = over_vocabulary(loss, link)
    for stage in stages.values():
        stage.link, stage.loss = link, loss
    if context is not None:
        context.give_time_to(store)
        for stage in stages.values():
            stage.attention = context.stage
    stream = ModuleStream(model, chain, loss, link)
    # What the executor asks of stages, microbatches and their shape, these do in the same way.
    executor = PipelineExecutor(
        cast("Any", stages),
        pp_rank=part.pp_rank,
        groups=groups,
        store=store,
        stream=cast("Any", stream),
    )
    executor.observer = ActionWatch(stages, cast("StageGathering", module.gathering), store)
    return PipelineModule(
        module=module,
        loss=loss,
        executor=executor,
        stream=stream,
        schedule=schedule,
        sequences=None if context is None else context.cut,
    )


def _rank_module(  # noqa: PLR0913 - what is known of a module, by its name
    plan: Plan,
    model: nn.Module,
    units: Sequence[str],
    *,
    described: Sequence[StagedParameter],
    named: Mapping[str, nn.Parameter],
    own: Collection[str],
    groups: RankGroups,
) -> RankModule:
    part = part_of(plan, groups.rank)
    here = [stage.stage for stage in part.stages]
    plans = plan_stage_buckets(plan, described, units, here)
    mine = [one.parameter for one in described if one.parameter.spec.name in own]
    held = {name: named[name] for name in named if name in own}
    masters = masters_of(plan, plans.trained, mine, held, groups)
    twice = part.mirrored and part.pp_rank >= plan.mesh.pp / 2
    uncounted = {
        one.parameter.spec.name
        for one in described
        if twice or (len(one.stages) > 1 and not part.first)
    }
    buckets = buckets_of(plan, plans.trained, mine, held, groups, None, uncounted=uncounted)
    frozen = frozen_buckets(plan, plans.frozen, mine, held, groups, None)
    cast_rest(plan, held, buckets + frozen)
    wide = TORCH_DTYPES[plan.mathematics.precision.reduction]
    passes = StagePasses(GradientReduction(plan, groups), groups.replicate, groups.tensor, wide)
    passes.hold(buckets)
    gathering = StageGathering([*buckets, *frozen], groups.shard, plan.layout.zero)
    mark_split(model)
    return RankModule(
        model=model,
        plan=plan,
        groups=groups,
        device=next(iter(named.values())).device,
        plans=plans,
        buckets=buckets,
        frozen=frozen,
        passes=passes,
        gathering=gathering,
        hooks=StageHooks(gathering, passes),
        parameter_store=None,
        masters=masters,
        parameters=[one.parameter for one in described],
        units=units,
    )


def _windows(plan: Plan, part: RankPart) -> list[Window]:
    stages = plan.layout.pipeline.stages
    before = [sum(map(len, stages[:stage])) for stage in range(len(stages) + 1)]
    return [
        Window(
            stage=one.stage,
            start=before[one.stage],
            stop=before[one.stage + 1],
            first=one.first,
            last=one.last,
        )
        for one in part.stages
    ]


def _check_layers(plan: Plan, chain: BlockChain, split: str) -> None:
    if len(chain) != (layers := plan.model.layers):
        raise InfeasiblePlan(
            MODULE_SPLIT.problem(
                f"the plan cuts model.layers = {layers} into stages, and {split} has "
                f"{len(chain)} blocks",
                key="model.layers",
                suggestions=(f"model.layers = {len(chain)}",),
            )
        )


def _check_offload(plan: Plan) -> None:
    if (home := plan.layout.zero.parameter_offload) != "none":
        raise InfeasiblePlan(
            MODULE_SETTINGS.problem(
                f'zero.parameter_offload = "{home}" keeps the slices of units of one stage',
                key="zero.parameter_offload",
                suggestions=('zero.parameter_offload = "none"', "mesh.pp = 1"),
            )
        )


def _as_tied(
    plan: Plan, named: Mapping[str, nn.Parameter], stages_of: Mapping[str, Sequence[int]]
) -> Plan:
    """Return the plan with ends that share something where the ends of the module do."""
    tied = any(len(stages_of[name]) > 1 and one.requires_grad for name, one in named.items())
    model = replace(plan.model, tied=tied)
    return replace(plan, mathematics=replace(plan.mathematics, model=model))


def _check_shared(described: Sequence[StagedParameter]) -> None:
    """ConfigError where both ends share what tensor ranks use on parts of values."""
    wrong = [one for one in described if len(one.stages) > 1 and one.parameter.summed]
    if wrong:
        name = wrong[0].parameter.spec.name
        raise ConfigError(
            MODULE_SHARED.problem(
                f"{name} is used in stages {', '.join(map(str, wrong[0].stages))}, and tensor "
                "ranks use it on values of which each has a part",
                key="tensor",
                suggestions=(f"tensor={{{name!r}: 'replicated'}}", "mesh.pp = 1", "mesh.tp = 1"),
            )
        )


def _owners(
    plan: Plan, stages_of: Mapping[str, Sequence[int]], schedule: Schedule
) -> dict[str, int]:
    """Return the first pipeline rank that holds each parameter."""
    held = [set(schedule.stages_of(pp_rank)) for pp_rank in range(plan.mesh.pp)]
    return {
        name: next(rank for rank, stages in enumerate(held) if stages & set(at))
        for name, at in stages_of.items()
    }


def _defer(
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    store: GradientStore,
    own: Collection[str],
) -> None:
    """Give weight gradients of own linear layers to the store, also where a schedule has no W.

    Each microbatch then adds its product to the bucket. What is ignored stays autograd's.
    """
    defer_weights(layers_of(model, (named[name] for name in own)), store)
