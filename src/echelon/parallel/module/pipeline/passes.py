# SPDX-License-Identifier: Apache-2.0
"""Gradients and parameters of the stages of a module, action by action of a schedule.

Split: as in `data.py` and `zero.py`.
Sent:  gradients as in `data.py`: a bucket is summed after the last backward of its stage, or after
       each (`zero.accumulate`); what both ends share is summed over them, too. At ZeRO stage 3 the
       parameters of a stage are gathered before each forward and each backward, and freed after it,
       or once per step where `zero.reshard_after_forward` is off.
Bytes: `module_pipeline_bytes` in `tests/parallel/module/sent_bytes.py`.
Must divide: nothing; buckets are padded.
Source: Rajbhandari et al., "ZeRO", 2020; Narayanan et al., 2021 (1F1B).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from echelon.core.errors import RunFailed
from echelon.core.rulebook.module import MODULE_BATCH
from echelon.parallel.data import GradientReduction
from echelon.parallel.module.gathering import ModuleParameterGathering
from echelon.parallel.module.gradients import BackwardPasses, ModuleReduction
from echelon.parallel.module.hooks import ModuleHooks
from echelon.parallel.module.pipeline.stage import ModuleStage
from echelon.parallel.pipeline import StepState
from echelon.parallel.storage.buckets import Bucket, Slot
from echelon.parallel.storage.gradients import GradientStore, Reduction
from echelon.parallel.transport.collectives import Group
from echelon.schedule.action import Action, ActionKind


class StageGradientStore(GradientStore):
    """Take gradients of any module: how often a parameter is used in a backward is not known.

    So a bucket is not full when a number of gradients has come, but when its stage says so.
    """

    def __init__(self, reduction: Reduction) -> None:
        """Tell `reduction` of buckets whose stage is done."""
        super().__init__(reduction)
        self.came: set[int] = set()

    def start_step(self) -> None:
        """Forget the gradients of the last step."""
        super().start_step()
        self.came.clear()

    @torch.no_grad()
    def end_backward(self, stage: int) -> None:
        """Learn that a stage has all weight gradients of a microbatch: what has none is zero."""
        for bucket in self._by_stage.get(stage, ()):
            if not (bucket.ends or bucket.adds_slices):
                continue
            for slot in bucket.slots:
                if slot.fresh:
                    self._open(slot)
                    slot.gradient.zero_()
                    slot.fresh = False
            self._reduction.bucket_is_full(bucket, last=bucket.ends)

    def _gradient_is_there(self, slot: Slot) -> None:
        slot.fresh = False
        self.came.add(id(slot.parameter))


class StagePasses(BackwardPasses):
    """Know of the one backward of a step, which a schedule runs in pieces."""

    store: StageGradientStore

    def __init__(
        self, reduction: GradientReduction, replicate: Group, tensor: Group, wire: torch.dtype
    ) -> None:
        """Reduce by `reduction`, whose buckets come in one order on all data ranks."""
        super().__init__(ModuleReduction(reduction), replicate, tensor, every=False, wire=wire)
        self.store = StageGradientStore(reduction)
        self._sums = reduction

    def hold(self, buckets: Sequence[Bucket]) -> None:
        self.store.hold(buckets)
        take = _taker(self.store)
        for bucket in buckets:
            for slot in bucket.slots:
                slot.parameter.register_post_accumulate_grad_hook(take)

    def start_step(self) -> None:
        self.store.start_step()
        self._sums.start_step()
        self.reduced, self.num_passes = False, 0

    def begin_step(self) -> None:
        """Begin the one backward of a step; RunFailed where there was one."""
        if self.num_passes:
            raise RunFailed(
                MODULE_BATCH.problem(
                    "a second backward would be added to gradients that are summed already",
                    suggestions=("optimizer.step()", "optimizer.zero_grad()"),
                )
            )
        self.num_passes = 1

    def unused(self) -> list[str]:
        return [
            slot.spec.name
            for bucket in self.store.buckets
            for slot in bucket.slots
            if id(slot.parameter) not in self.store.came
        ]

    def start_missing(self) -> None:
        """RunFailed where this step had no backward."""
        if not self.num_passes:
            raise RunFailed(
                MODULE_BATCH.problem(
                    "a step has no backward", suggestions=("optimizer.backward(batch)",)
                )
            )

    def finish(self) -> None:
        """Return when the gradients of this step are summed."""
        self._sums.finish()

    def drop(self) -> None:
        self._sums.finish()
        self.start_step()


class StageGathering(ModuleParameterGathering):
    """Gather the parameters of a stage for an action, and free them after it."""

    def begin(self, stage: int) -> None:
        """Make a stage whole."""
        held = [bucket for bucket in self.sliced if stage in bucket.plan.stages]
        for bucket in held:
            self._gather_missing(bucket)
        for bucket in held:
            self._await(bucket)

    def end(self, stage: int) -> None:
        """Free a stage, unless it stays whole for the step."""
        for bucket in self.sliced if self.frees else ():
            if stage in bucket.plan.stages:
                self._free(bucket)


class StageHooks(ModuleHooks):
    """Stand where hooks of units would: a schedule says what is used when."""

    def end_step(self, world: Group) -> None:
        """Do nothing: every rank runs the same actions."""

    def free_all(self) -> None:
        """Free every stage."""
        self._gathering.free_all()


class ActionWatch:
    """Do before and after each action of a schedule what parameters and gradients ask for."""

    def __init__(
        self,
        stages: Mapping[int, ModuleStage],
        gathering: StageGathering,
        store: StageGradientStore,
    ) -> None:
        self._stages, self._gathering, self._store = stages, gathering, store

    def action_began(self, action: Action, state: StepState) -> None:
        """Make the parameters of a stage whole; weight gradients alone do not read them."""
        if action.kind is not ActionKind.W:
            self._gathering.begin(action.stage)
        if action.kind in (ActionKind.B, ActionKind.BW):
            self._stages[action.stage].begin_backward(action.microbatch)

    def action_ended(self, action: Action, state: StepState) -> None:
        """Free the parameters, and sum gradients that are complete."""
        if action.kind in (ActionKind.B, ActionKind.BW):
            self._stages[action.stage].end_backward()
        if action.kind is not ActionKind.W:
            self._gathering.end(action.stage)
        if action.kind in (ActionKind.W, ActionKind.BW):
            self._store.end_backward(action.stage)


def _taker(store: StageGradientStore) -> Callable[[torch.Tensor], None]:
    """Return a hook that gives gradients to a store for as long as somebody holds it."""
    held = weakref.ref(store)

    @torch.no_grad()
    def take(parameter: torch.Tensor) -> None:
        owner = held()
        gradient, parameter.grad = parameter.grad, None
        if owner is not None and gradient is not None:
            owner.add(parameter, gradient)

    return take
