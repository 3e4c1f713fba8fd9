"""The trainer in its own precision with a bug in what it follows or resumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from echelon.parallel.fp8_scales import TensorScales
from echelon.training import whole_run
from echelon.training.engine import TrainEngine
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
