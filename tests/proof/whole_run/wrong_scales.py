"""The trainer in its own precision with a bug in what it follows or resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isinf
from typing import Any

import pytest
import torch

from echelon.parallel.fp8_scales import TensorScales
from echelon.training import engine, whole_run
from echelon.training.engine import TrainEngine
from echelon.training.loop import TrainLoop
from echelon.training.optimizer import SliceOptimizer
from echelon.training.steps.loss_scale import LossScale
from tests.proof.whole_run.wrong_trainers import planted


@planted(whole_run.train_and_resume)
def loss_scale_is_not_saved(patch: pytest.MonkeyPatch) -> None:
    """Begin each run with the first scale."""
    patch.setattr(LossScale, "resume", lambda self, position: None)


@planted(whole_run.train_and_resume)
def hysteresis_is_not_saved(patch: pytest.MonkeyPatch) -> None:
    """Forgive all overflows again after a resume."""
    right = LossScale.load

    def load(self: LossScale, state: Mapping[str, Any]) -> None:
        right(self, {**state, "hysteresis_left": self._precision.loss_scale_hysteresis})

    patch.setattr(LossScale, "load", load)


@planted(whole_run.train_and_resume)
def hysteresis_is_not_reset(patch: pytest.MonkeyPatch) -> None:
    """Forgive no overflow any more once the scale has grown."""
    right = LossScale._went_well

    def went_well(self: LossScale) -> None:
        left = self.hysteresis_left
        right(self)
        self.hysteresis_left = left

    patch.setattr(LossScale, "_went_well", went_well)


@planted(whole_run.train_and_resume)
def step_is_not_skipped(patch: pytest.MonkeyPatch) -> None:
    """Take a step whose gradients overflow."""
    right = TrainEngine._update

    def update(self: TrainEngine, report: Any, step: int) -> None:
        right(self, whole_run.replace(report, skipped=False, grad_norm=1.0), step)

    patch.setattr(TrainEngine, "_update", update)


@planted(whole_run.train_and_resume)
def largest_numbers_are_not_resumed(patch: pytest.MonkeyPatch) -> None:
    """Begin without the largest numbers that scales of whole tensors come from."""
    patch.setattr(TensorScales, "load", lambda self, state: None)


@planted(whole_run.train_and_resume)
def last_of_the_history_is_lost(patch: pytest.MonkeyPatch) -> None:
    """Resume without the newest of the largest numbers."""
    right = TensorScales.load

    def load(self: TensorScales, state: Mapping[str, Any]) -> None:
        right(self, {**state, "history": state["history"][:-1]})

    patch.setattr(TensorScales, "load", load)


@planted(whole_run.train_and_resume)
def updates_are_counted_from_zero(patch: pytest.MonkeyPatch) -> None:
    """Resume without the number of updates that bias correction needs."""
    patch.setattr(SliceOptimizer, "set_num_steps", lambda self, count: None)


@planted(whole_run.train_and_resume)
def no_number_is_no_overflow(patch: pytest.MonkeyPatch) -> None:
    """Skip steps with an infinite norm, and not those whose norm is no number."""
    patch.setattr(engine, "isfinite", lambda norm: not isinf(norm))


@planted(whole_run.train_and_resume)
def overflows_of_the_first_rank_alone(patch: pytest.MonkeyPatch) -> None:
    """Skip steps in which the first rank overflows, whatever the others have."""
    agree = engine.agree
    rows: list[torch.Tensor] = []

    def noted(*args: Any) -> torch.Tensor:
        rows[:] = [agree(*args)]
        return rows[0]

    patch.setattr(engine, "agree", noted)
    patch.setattr(engine, "isfinite", lambda norm: bool(rows[0][0, :2].isfinite().all()))


@planted(whole_run.train_and_resume)
def scale_falls_below_its_floor(patch: pytest.MonkeyPatch) -> None:
    """Halve the scale without a look at the least one."""
    right = LossScale._overflowed

    def overflowed(self: LossScale) -> None:
        precision = self._precision
        self._precision = replace(precision, loss_scale_min=0.0)
        right(self)
        self._precision = precision

    patch.setattr(LossScale, "_overflowed", overflowed)


@planted(whole_run.train_and_resume)
def history_of_all_steps(patch: pytest.MonkeyPatch) -> None:
    """Let scales of 8 bits look back on every step there was."""
    init = TensorScales.__init__

    def unlimited(self: TensorScales, *args: Any) -> None:
        init(self, *args)
        self._num_steps = 1000

    patch.setattr(TensorScales, "__init__", unlimited)


@planted(whole_run.train_and_resume)
def scales_of_the_last_step(patch: pytest.MonkeyPatch) -> None:
    """Make scales of 8 bits of the last step alone."""
    find = TensorScales._find_scales

    def of_the_last(self: TensorScales) -> None:
        history, self._history = self._history, self._history[-1:]
        find(self)
        self._history = history

    patch.setattr(TensorScales, "_find_scales", of_the_last)


@planted(whole_run.train_and_resume)
def parameters_are_not_those_of_a_file(patch: pytest.MonkeyPatch) -> None:
    """Read weights of a file into master copies, and begin with other parameters."""
    begin = TrainLoop._begin

    def unrefreshed(self: TrainLoop) -> int:
        with pytest.MonkeyPatch.context() as inner:
            if self.job.train.weights != "none":
                inner.setattr(TrainEngine, "refresh", lambda self: None)
            return begin(self)

    patch.setattr(TrainLoop, "_begin", unrefreshed)
