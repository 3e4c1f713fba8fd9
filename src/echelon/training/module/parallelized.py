"""What `ec.parallelize` does: which cuts a plan asks for, and the optimizer that fits them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from echelon.core.errors import ConfigError
from echelon.core.event import EventSink
from echelon.core.plan import Plan
from echelon.core.rulebook.module import MODULE_ARGUMENT
from echelon.core.rulebook.module_pipeline import MODULE_LOSS
from echelon.parallel.module.context.build import apply_context
from echelon.parallel.module.loss import Batch, LossChoice, ModuleLoss, loss_of
from echelon.parallel.module.module import apply_to_module
from echelon.parallel.module.pipeline.build import apply_pipeline
from echelon.parallel.module.pipeline.chain import find_blocks
from echelon.parallel.module.units import BLOCKS, UnitChoice
from echelon.training.module.optimizer import Joined, ModuleOptimizer, RateOwner, Unused
from echelon.training.module.whole_step import LoopRunner, PipelineRunner, WholeSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Hold what the caller of `ec.parallelize` chose; see there."""

    units: UnitChoice = BLOCKS
    unused: Unused = "error"
    gradients: Joined = "mean"
    learning_rate: RateOwner = "plan"
    ignore: Sequence[str] = ()
    split: str = ""
    loss: LossChoice | None = None
    example: Batch | None = None


def parallelized(
    plan: Plan, model: nn.Module, choices: Choices, sink: EventSink | None
) -> ModuleOptimizer:
    """Split `model` as `plan` says; return its optimizer."""
    loss = None if choices.loss is None else loss_of(choices.loss)
    if loss is not None:
        # Its gradients are those of one sum over one count: ranks add theirs up.
        choices = replace(choices, gradients="sum")
    if plan.mesh.pp > 1:
        return _pipelined(plan, model, choices, loss, sink)
    units = choices.units
    if choices.split and units == BLOCKS:
        units = list(find_blocks(model, choices.split))
    cuts = ("cp",) if plan.mesh.cp > 1 else ()
    if cuts and (loss is None or choices.example is None):
        raise _missing(f"mesh.cp = {plan.mesh.cp}", {"loss": loss, "example": choices.example})
    module = apply_to_module(plan, model, units=units, ignore=choices.ignore, sink=sink, cuts=cuts)
    steps = None
    if loss is not None and cuts and choices.example is not None:
        context = apply_context(model, plan, module.groups, loss=loss, example=choices.example)
        context.give_time_to(module.passes.store)
        runner = LoopRunner(module, loss, context)
        steps = WholeSteps(module, loss, runner, context.cut)
    elif loss is not None:
        steps = WholeSteps(module, loss, LoopRunner(module, loss))
    return ModuleOptimizer(
        module,
        unused=choices.unused,
        gradients=choices.gradients,
        learning_rate=choices.learning_rate,
        steps=steps,
    )


def _pipelined(
    plan: Plan,
    model: nn.Module,
    choices: Choices,
    loss: ModuleLoss | None,
    sink: EventSink | None,
) -> ModuleOptimizer:
    if loss is None or choices.example is None or not choices.split:
        given = {"split": choices.split or None, "loss": loss, "example": choices.example}
        raise _missing(f"mesh.pp = {plan.mesh.pp}", given)
    if choices.units != BLOCKS:
        raise ConfigError(
            MODULE_ARGUMENT.problem(
                f"units = {choices.units!r}, and what a pipeline gathers is a stage",
                key="units",
                suggestions=("units='blocks'",),
            )
        )
    pipeline = apply_pipeline(
        plan,
        model,
        split=choices.split,
        loss=loss,
        example=choices.example,
        ignore=choices.ignore,
        sink=sink,
    )
    return ModuleOptimizer(
        pipeline.module,
        unused=choices.unused,
        gradients=choices.gradients,
        learning_rate=choices.learning_rate,
        steps=WholeSteps(pipeline.module, loss, PipelineRunner(pipeline), pipeline.sequences),
    )


def _missing(asked: str, given: Mapping[str, object]) -> ConfigError:
    missing = [name for name, one in given.items() if one is None]
    return ConfigError(
        MODULE_LOSS.problem(
            f"{asked} asks for {', '.join(missing)}",
            key=missing[0],
            suggestions=("split='model.layers', loss='causal', example=microbatch",),
        )
    )
