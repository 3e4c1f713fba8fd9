# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a module that is split over ranks: for your own loop, and torch's schedulers.

model, optimizer = ec.parallelize(model, plan)
for batch in batches:
    loss = compute(model(batch))
    optimizer.scale(loss).backward()        # scale: where the plan has a loss scale
    report = optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch

from echelon.core.errors import RunFailed
from echelon.core.rulebook.module import (
    FROZEN_CHANGED,
    LEARNING_RATE_OWNER,
    LOSS_NOT_SCALED,
    RANKS_IN_STEP,
    UNUSED_PARAMETER,
)
from echelon.core.rulebook.run import LOSS_NOT_FINITE
from echelon.parallel.module.loss import Batch
from echelon.parallel.module.module import RankModule, UnitSummary
from echelon.parallel.module.tensor.ranks import check_equal_buffers, check_equal_gradients
from echelon.training.module.state import ModuleState, guard_values
from echelon.training.module.whole_step import BatchLoss, WholeSteps, no_loss
from echelon.training.optimizer import MASTER, SliceOptimizer, local_norm_squared
from echelon.training.optimizer.step import learning_rate
from echelon.training.steps.loss_scale import LossScale

Unused = Literal["error", "zero"]
"""What a parameter without a gradient on some rank is: a mistake, or a gradient of zero."""

Joined = Literal["mean", "sum"]
"""What the gradients of data ranks become: their mean (as in DDP), or their sum."""

RateOwner = Literal["plan", "own"]
"""Who sets the learning rate: the plan's schedule, or whoever writes `param_groups`."""

_SHOWN = 8  # names in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleStep:
    """Say what one step did, the same on every rank.

    `grad_norm` is that of the whole gradient before clipping. A `skipped` step changed nothing: a
    gradient overflowed under `loss_scale`.
    """

    step: int
    grad_norm: float
    learning_rate: float
    loss_scale: float
    skipped: bool


class ModuleOptimizer(torch.optim.Optimizer):
    """Update the parameters of a split module: reduction, norm, clipping, slices, write-back.

    `param_groups` has one group, for schedulers; everything else is the plan's. The gradients of
    parameters are in buckets, not in `grad`, and are clipped as the plan says.
    """

    def __init__(
        self,
        module: RankModule,
        *,
        unused: Unused = "error",
        gradients: Joined = "mean",
        learning_rate: RateOwner = "plan",
        steps: WholeSteps | None = None,
    ) -> None:
        """Reserve the state of this rank's slices; every rank does so together."""
        plan = module.plan
        self.module = module
        self.num_steps = self.num_updates = 0
        self.watches_ranks = True
        self.loss_scale = LossScale(plan.mathematics.precision)
        self._unused, self._rate_owner = unused, learning_rate
        self._steps = steps
        self.divisor = plan.mesh.dp if gradients == "mean" else 1
        self._scaled = self._complete = False
        slots = [slot for bucket in module.buckets for slot in bucket.slots]
        super().__init__(
            [slot.parameter for slot in reversed(slots)],
            {"lr": plan.mathematics.optimizer.learning_rate},
        )
        self._complete = True
        self._written_rate = 0.0
        self.set_rate(plan.mathematics.optimizer.learning_rate)
        self.slices = SliceOptimizer(
            module.buckets, plan, groups=module.groups, device=module.device
        )
        masters = self.slices.state().get(MASTER, {})
        for name, master in masters.items():
            master.copy_(module.masters[name])
        module.passes.start_step()
        self._state = ModuleState(module, self.slices)
        guard_values(module.model, self._state)

    # The loop.

    def no_sync(self) -> AbstractContextManager[None]:
        """Add up the backward passes inside on this rank: for all but the last of a step.

        With zero.accumulate = "slices" every backward is summed over the ranks all the same.
        """
        return self.module.passes.no_sync()

    def backward(self, batch: Batch) -> BatchLoss:
        """Run forward and backward of a global batch, the same on every rank; return its loss.

        Where `parallelize` was given a loss. Gradients are of the sum over its count.
        """
        if self._steps is None:
            raise no_loss()
        self._scaled = True
        return self._steps.run(batch, self.loss_scale.value, train=True)

    def evaluate(self, batch: Batch) -> BatchLoss:
        """Return the loss of a global batch, without gradients."""
        if self._steps is None:
            raise no_loss()
        return self._steps.run(batch, 1.0, train=False)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale (1 where the plan has none), for backward."""
        self._scaled = True
        return loss * self.loss_scale.value if self.loss_scale.active else loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step; all ranks do so together.

        There is nothing to drop after `step`, and nothing happens then.
        """
        passes = self.module.passes
        if passes.num_passes or passes.running:
            passes.drop()

    @torch.no_grad()
    def step(self) -> ModuleStep:  # type: ignore[override]
        """Sum what is not summed yet, clip, update this rank's slices, send parameters.

        Parameters that are kept whole are so on return. RunFailed where a gradient is not finite
        and there is no loss scale, or a parameter got no gradient and that is an error.
        """
        self._state.require_slices("what a step changes would be lost")
        module, scale = self.module, self.loss_scale.value
        rate = self._take_rate()
        self._require_scaled()
        module.passes.start_missing()
        module.hooks.end_step(module.groups.world)
        module.passes.finish()
        module.gathering.end_pass()
        if self.num_steps == 0 and self.watches_ranks:
            groups = module.groups
            check_equal_gradients(module.buckets, module.split, groups.tensor, groups.world)
            check_equal_buffers(module.model, groups.tensor, groups.world)
        unused = module.passes.unused()
        mine = local_norm_squared(module.buckets)
        norm_squared, num_unused = agree_on_step(module, rate, mine, len(unused))
        if num_unused and self._unused == "error":
            refuse_unused(module, unused, self.num_steps)
        norm = norm_squared**0.5 / scale / self.divisor
        skipped = not isfinite(norm) and self.loss_scale.active
        if not isfinite(norm) and not skipped:
            raise RunFailed(
                LOSS_NOT_FINITE.problem(f"the gradient norm is {norm}; nothing changed")
            )
        if not skipped:
            self._update(norm, rate)
        self.loss_scale.after(overflowed=skipped)
        report = ModuleStep(
            step=self.num_steps,
            grad_norm=norm,
            learning_rate=rate,
            loss_scale=scale,
            skipped=skipped,
        )
        self._start_next()
        return report

    # What there is.

    @property
    def data_rank(self) -> int:
        """Return which of the `num_data_ranks` batches of a step is this rank's.

        Ranks that compute one batch together (tensor, pipeline, context) have the same.
        """
        return self.module.groups.data.index // self.module.plan.mesh.cp

    @property
    def num_data_ranks(self) -> int:
        """Return how many batches a step has at a time."""
        return self.module.plan.mesh.dp

    def units(self) -> tuple[UnitSummary, ...]:
        """Return what each unit holds; see `UnitSummary`."""
        return self.module.unit_table()

    def whole(self) -> AbstractContextManager[None]:
        """Hold all parameters whole, to be read and written: all ranks enter and leave together.

        What a rank wrote to the elements that it owns is kept, so all write the same. No step, save
        or load of the optimizer is taken inside.
        """
        return self._state.whole()

    def full_state(self, take: Callable[[str, str, torch.Tensor], None]) -> None:
        """Give rank 0 every whole tensor in turn: `take(kind, parameter's name, tensor)`.

        Kinds are "parameters", "master" where there is a master copy, and those of the optimizer's
        state. Every rank calls this; on the others `take` is not called.
        """
        self._state.full_state(take)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's slices of parameters and state, as copies, and where training is."""
        return self._state.save(self.progress())

    def progress(self) -> dict[str, Any]:
        """Return where training is: beside `full_state`, what `load_full_state` goes on from."""
        return {
            "num_steps": self.num_steps,
            "num_updates": self.num_updates,
            "loss_scale": self.loss_scale.state(),
            "learning_rate": float(self.param_groups[0]["lr"]),
        }

    def load_full_state(
        self, give: Callable[[str, str], torch.Tensor], progress: Mapping[str, Any]
    ) -> None:
        """Go on from tensors of `full_state`, of any layout; all ranks call it together.

        `give(kind, name)` returns a whole tensor on rank 0; on the others it is not called.
        """
        self._state.load_full(give, progress["num_updates"])
        self._go_on(progress)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from the `state_dict` of the same rank, module and plan."""
        self._state.load(state_dict)
        self._go_on(state_dict)

    def save(self, path: str | Path) -> None:
        """Write whole tensors and where training is to one file; all ranks call it together.

        Rank 0 has the whole model and its state in memory then. Any other layout can `load` it.
        """
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        self.full_state(
            lambda kind, name, tensor: tensors.setdefault(kind, {}).update({name: tensor.cpu()})
        )
        if self.module.groups.rank == 0:
            torch.save({"progress": self.progress(), "tensors": tensors}, path)
        self.module.groups.world.gather_objects("saved")

    def load(self, path: str | Path) -> None:
        """Go on from a file of `save`, made under this or any other layout; rank 0 reads it.

        CheckpointError where the file is not of this module.
        """
        saved = self._state.read_full(path)
        self.load_full_state(lambda kind, name: saved["tensors"][kind][name], saved["progress"])

    def close(self) -> None:
        """Give back files and buffers that are not on the device."""
        self.slices.store.close()
        if self.module.parameter_store is not None:
            self.module.parameter_store.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take the one group of the start; there is no other."""
        if self._complete:
            raise RunFailed(FROZEN_CHANGED.problem("parameters are added to a split module"))
        super().add_param_group(param_group)

    def set_rate(self, rate: float) -> None:
        """Set the rate of the next step to the plan's, or to `rate` where the plan has no say."""
        if self._rate_owner == "plan":
            rate = learning_rate(self.module.plan.mathematics.optimizer, self.num_steps)
        self._written_rate = rate
        self.param_groups[0]["lr"] = self._written_rate

    # Inside of a step.

    def _go_on(self, progress: Mapping[str, Any]) -> None:
        self.num_steps, self.num_updates = progress["num_steps"], progress["num_updates"]
        self.loss_scale.load(progress["loss_scale"])
        self.set_rate(progress["learning_rate"])

    def _start_next(self) -> None:
        self._scaled = False
        self.num_steps += 1
        self.set_rate(float(self.param_groups[0]["lr"]))
        self.module.passes.start_step()

    def _update(self, norm: float, rate: float) -> None:
        clip = self.module.plan.mathematics.optimizer.clip_norm
        factor = 1.0 / self.loss_scale.value / self.divisor
        if clip is not None and norm > clip:
            factor *= clip / norm
        self.slices.update(rate, factor, self.module.gathering.updated)
        # Parameters may be read outside of the module's forward: nothing is under way on return.
        self.module.gathering.settle()
        self.num_updates += 1
        # A graph from before this update must not be used for a backward, as with any optimizer.
        torch.autograd.graph.increment_version(
            [slot.parameter for bucket in self.module.buckets for slot in bucket.slots]
        )

    def _take_rate(self) -> float:
        rate = float(self.param_groups[0]["lr"])
        if self._rate_owner == "plan" and rate != self._written_rate:
            raise RunFailed(
                LEARNING_RATE_OWNER.problem(
                    f"the plan's learning rate of step {self.num_steps} is {self._written_rate:g}, "
                    f'and someone wrote {rate:g} to param_groups[0]["lr"]',
                    suggestions=('parallelize(..., learning_rate="own")',),
                )
            )
        return rate

    def _require_scaled(self) -> None:
        if self.loss_scale.active and not self._scaled and self.module.passes.num_passes:
            raise RunFailed(
                LOSS_NOT_SCALED.problem(
                    f"precision.loss_scaling is on (now {self.loss_scale.value:g}), and no loss of "
                    "this step was scaled",
                    suggestions=("optimizer.scale(loss).backward()",),
                )
            )


def agree_on_step(
    module: RankModule, rate: float, norm_squared: float, num_unused: int
) -> tuple[float, int]:
    """Exchange what every rank must know of a step, in one small all-gather.

    Return the squares of the gradient, and how many parameters got none, over all ranks.
    RunFailed, on every rank, where what must be the same is not.
    """
    groups = module.groups
    # Whole gradients count on one data rank, slices on those of one replica.
    sliced = module.plan.layout.zero.stage > 0
    counts = (groups.replicate if sliced else groups.data).index == 0
    row = torch.tensor(
        [norm_squared if counts else 0.0, float(num_unused), float(_has_changed(module)), rate],
        dtype=torch.float64,
        device=module.device,
    )
    rows = groups.world.gather_rows(row, name="step")
    with groups.recorder.reading("what all ranks say of the step"):
        rows = rows.cpu()
    total = rows.sum(0)
    if total[2]:
        raise RunFailed(
            FROZEN_CHANGED.problem(
                f"requires_grad of parameters has changed on {int(total[2])} ranks"
            )
        )
    if bool((rows[:, 3] != rate).any()):
        rates = ", ".join(f"{value:g}" for value in rows[:, 3].tolist())
        raise RunFailed(RANKS_IN_STEP.problem(f"the learning rates of the ranks are {rates}"))
    return float(total[0]), int(total[1])


def refuse_unused(module: RankModule, mine: Sequence[str], step: int) -> None:
    """Raise RunFailed, on every rank the same: which parameters got no gradient, and where."""
    everyone: list[list[str]] = module.groups.world.gather_objects(list(mine))
    ranks_of: dict[str, list[int]] = {}
    for rank, names in enumerate(everyone):
        for name in names:
            ranks_of.setdefault(name, []).append(rank)
    order = [one.spec.name for one in module.parameters]
    problems = [
        UNUSED_PARAMETER.problem(
            f"{name} got no gradient in step {step} on {_describe_ranks(ranks, len(everyone))}",
            key="unused",
            suggestions=('parallelize(..., unused="zero")', f"ignore=[{name!r}]"),
        )
        for name, ranks in sorted(ranks_of.items(), key=lambda one: order.index(one[0]))
    ]
    raise RunFailed(problems[:_SHOWN])


def _has_changed(module: RankModule) -> bool:
    """Return whether a parameter is trained that was not, or the other way round."""
    named = dict(module.model.named_parameters())
    return any(named[one.spec.name].requires_grad is not one.trained for one in module.parameters)


def _describe_ranks(ranks: Sequence[int], world_size: int) -> str:
    if len(ranks) == world_size:
        return "every rank"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
