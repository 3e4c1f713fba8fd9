# SPDX-License-Identifier: Apache-2.0
"""The order in which a pipeline is made of a module on one rank.

follow its forward -> which stage uses what -> check each stage alone -> cut sequences -> buckets
of own stages -> parameters of others away -> weight gradients put off -> executor.

The check: a stage gets the stream that the whole module had there, and all parameters that are not
its own read as NaN. If it depends on anything of another stage, by whatever way, the result is NaN;
if it leaves something out, the result is another. Both are refused before training begins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from echelon.core.axis import Axis
from echelon.core.errors import ConfigError, InfeasiblePlan, Problem, RunFailed
from echelon.core.event import EventSink, NoEvents
from echelon.core.plan import Plan
from echelon.core.rulebook.module import (
    MODULE_CHAIN,
    MODULE_PARAMETERS,
    MODULE_SETTINGS,
    MODULE_SHARED,
    MODULE_SPLIT,
)
from echelon.layout.modules import ROOT, StagedParameter, plan_stage_buckets
from echelon.layout.stage import RankPart, part_of
from echelon.models.precision import TORCH_DTYPES
from echelon.parallel.data import GradientReduction
from echelon.parallel.device_mesh import RankGroups, rank_groups
from echelon.parallel.module.context import SequenceCut, apply_context
from echelon.parallel.module.forwards.linear import defer_weights, layers_of
from echelon.parallel.module.forwards.norms import shorten_norms
from echelon.parallel.module.loss import Batch, ModuleLoss, over_vocabulary
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
from echelon.parallel.module.pipeline.chain import (
    EPILOGUE,
    PROLOGUE,
    BlockChain,
    Trace,
    find_blocks,
    follow,
    leaving_no_trace,
    set_random_state,
)
from echelon.parallel.module.pipeline.passes import (
    ActionWatch,
    StageGathering,
    StageHooks,
    StagePasses,
)
from echelon.parallel.module.pipeline.stage import (
    ModuleMicrobatch,
    ModuleStage,
    ModuleStream,
    Window,
    hide,
    show,
)
from echelon.parallel.module.start import (
    agree_on_module,
    check_plan,
    check_ranks,
    managed_parameters,
    share_values,
)
from echelon.parallel.module.tensor.apply import NO_RULES, TensorChoice, apply_split, choose_split
from echelon.parallel.module.tensor.ranks import sums_of
from echelon.parallel.pipeline import PipelineExecutor
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.recorder import Recorder
from echelon.schedule.action import Schedule
from echelon.schedule.from_plan import schedule_from_plan

_ROUNDING = 1e3
"""Units of rounding by which a device may compute the same differently."""


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


def stages_of_parameters(
    chain: BlockChain,
    trace: Trace,
    named: Mapping[str, nn.Parameter],
    stages: Sequence[Sequence[int]],
) -> dict[str, tuple[int, ...]]:
    """Return the stages that use each parameter; ConfigError where they cannot share it.

    One that nothing used is of its block's stage, or of the first.
    """
    last = len(stages) - 1
    stage_of = {chain.names[block]: at for at, blocks in enumerate(stages) for block in blocks}
    of_part = {PROLOGUE: 0, EPILOGUE: last, **stage_of}
    found = {name: {of_part[part] for part in trace.uses[name]} for name in named}
    for block_name, block in chain.blocks.items():
        inside = {id(one) for one in block.parameters()}
        for name, one in named.items():
            if id(one) in inside:
                found[name].add(stage_of[block_name])
    shared = {n: sorted(at) for n, at in found.items() if len(at) > 1 and at != {0, last}}
    problems: list[Problem] = [
        MODULE_SHARED.problem(
            f"{name} is used in stages {', '.join(map(str, at))}",
            key="pipeline.stages",
            suggestions=("pipeline.stages with both uses in one stage", "mesh.pp = 1"),
        )
        for name, at in shared.items()
    ]
    if problems:
        raise ConfigError(problems)
    return {name: tuple(sorted(at or {0})) for name, at in found.items()}


@torch.no_grad()
def check_stages(
    named: Mapping[str, nn.Parameter],
    stages: Collection[ModuleStage],
    trace: Trace,
    stages_of: Mapping[str, Sequence[int]],
) -> None:
    """Run each stage of this rank alone on the example; ConfigError where it is not the module's.

    The caller saves and restores random numbers and buffers.
    """
    for stage in stages:
        window = stage.window
        foreign = {n: p for n, p in named.items() if window.stage not in stages_of[n]}
        received = trace.streams.get(window.start)
        device = next(iter(named.values())).device
        set_random_state(trace.random[-1], device)
        stage.on_enter = partial(set_random_state, trace.random[window.start], device)
        kept = hide(foreign)
        try:
            x = None if window.first or received is None else received.clone()
            out = stage(x, ModuleMicrobatch(index=0, batch=trace.example))
        except RunFailed as error:
            raise ConfigError(list(error.problems)) from error
        finally:
            show(foreign, kept)
            stage.on_enter = lambda: None
        expected = trace.loss if window.last else trace.streams[window.stop]
        what = "its loss" if window.last else "its stream"
        if not _equal(out, expected):
            raise ConfigError(
                MODULE_CHAIN.problem(
                    f"stage {window.stage}, run alone, gives another result than the whole module: "
                    f"{what} {_difference(out, expected)}",
                    key="split",
                    suggestions=("mesh.pp = 1",),
                )
            )


@torch.no_grad()
def check_same_on_ranks(
    plan: Plan, model: nn.Module, chain: BlockChain, loss: ModuleLoss, example: Batch, world: Group
) -> None:
    """ConfigError on every rank where one has another loss: its forward depends on the rank.

    All call it with the same values. Only ranks that compute one batch together, and were given the
    same example, are compared.
    """
    with leaving_no_trace(model):
        torch.manual_seed(0)
        found = follow(model, chain, loss, example, at=frozenset()).loss
    given = [sums_of(one) for one in example.values() if isinstance(one, torch.Tensor)]
    limit = _ROUNDING * torch.finfo(found.dtype).eps * abs(float(found))
    told: list[tuple[object, float]] = world.gather_objects((given, float(found)))
    for rank, (batch, one) in enumerate(told):
        first = plan.mesh.group(rank, Axis.PP, Axis.CP, Axis.TP)[0]
        other, right = told[first]
        if batch == other and not abs(one - right) <= limit:
            raise ConfigError(
                MODULE_CHAIN.problem(
                    f"the loss of the example is {right:.9g} on rank {first} and {one:.9g} on rank "
                    f"{rank}, which compute one batch together: the forward depends on the rank",
                    key="split",
                    suggestions=("a forward that is the same on every rank",),
                )
            )


def _equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    tolerance = _ROUNDING * torch.finfo(expected.dtype).eps
    return torch.equal(found, expected) or bool(
        (found - expected).abs().max() <= tolerance * expected.abs().max()
    )


def _difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    if found.shape != expected.shape:
        return f"is {tuple(found.shape)}, not {tuple(expected.shape)}"
    if bool(found.isnan().any()):
        return "depends on parameters or activations of another stage (NaN)"
    return f"differs by {float((found - expected).abs().max()):.3g}"
