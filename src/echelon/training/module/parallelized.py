# SPDX-License-Identifier: Apache-2.0
"""What `ec.parallelize` does: which cuts a plan asks for, and the optimizer that fits them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from echelon.core.errors import ConfigError
from echelon.core.event import EventSink
from echelon.core.plan import Plan
from echelon.core.rulebook.module import MODULE_ARGUMENT, MODULE_LOSS
from echelon.parallel.module.context import apply_context
from echelon.parallel.module.loss import Batch, LossChoice, ModuleLoss, loss_of, over_vocabulary
from echelon.parallel.module.module import BLOCKS, UnitChoice, apply_to_module
from echelon.parallel.module.pipeline.build import apply_pipeline
from echelon.parallel.module.pipeline.chain import find_blocks
from echelon.parallel.module.tensor.apply import AUTO, Rules, TensorChoice
from echelon.training.module.optimizer import Joined, ModuleOptimizer, RateOwner, Unused
from echelon.training.module.whole_step import LoopRunner, PipelineRunner, WholeSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Hold what the caller of `ec.parallelize` chose; see there."""

    units: UnitChoice = BLOCKS
    """What is gathered at a time."""
    unused: Unused = "error"
    """What a parameter without a gradient is."""
    gradients: Joined = "mean"
    """What the gradients of data ranks become."""
    learning_rate: RateOwner = "plan"
    """Who sets the learning rate."""
    ignore: Sequence[str] = ()
    """Parameters and modules that stay the caller's."""
    tensor: Rules | Literal["auto", "guess"] = AUTO
    """Which layers tensor ranks cut."""
    accepts_guess: bool = False
    """Whether rules that were guessed have been proven."""
    split: str = ""
    """The list of blocks."""
    loss: LossChoice | None = None
    """What is added up, where a step takes a global batch."""
    example: Batch | Sequence[Any] | None = None
    """One microbatch, or the arguments of one forward."""

    @property
    def of_tensor(self) -> TensorChoice:
        """Return what is said of tensor ranks."""
        batch = self.microbatch
        example: Sequence[Any] = () if self.example is None else (self.example,)
        if batch is None and self.example is not None:
            example = tuple(self.example)
        elif batch is not None and self.loss is not None:
            example = (loss_of(self.loss).inputs(batch),)
        return TensorChoice(rules=self.tensor, example=example, accepts_guess=self.accepts_guess)

    @property
    def microbatch(self) -> Batch | None:
        """Return the example where it is a batch: named tensors."""
        return self.example if isinstance(self.example, Mapping) else None


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
    if cuts and (loss is None or choices.microbatch is None):
        raise _missing(f"mesh.cp = {plan.mesh.cp}", {"loss": loss, "example": choices.microbatch})
    module = apply_to_module(
        plan,
        model,
        units=units,
        ignore=choices.ignore,
        tensor=choices.of_tensor,
        sink=sink,
        cuts=cuts,
    )
    if loss is not None and module.link is not None:
        loss = over_vocabulary(loss, module.link)
    steps = None
    if loss is not None and cuts and choices.microbatch is not None:
        context = apply_context(model, plan, module.groups, loss=loss, example=choices.microbatch)
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
    if loss is None or choices.microbatch is None or not choices.split:
        given = {"split": choices.split or None, "loss": loss, "example": choices.microbatch}
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
        example=choices.microbatch,
        ignore=choices.ignore,
        tensor=choices.of_tensor,
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
