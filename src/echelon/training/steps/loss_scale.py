# SPDX-License-Identifier: Apache-2.0
"""The factor of the loss in fp16, which keeps small gradients from becoming zero.

Micikevicius et al., "Mixed Precision Training", 2018, section 3.2. The loss of each step is
multiplied by `value` before backward and its gradients are divided by it before the update. All
ranks see the same overflows, so their scales never differ.

A scale that is a power of two, as the default is and as halving and doubling keep it, changes only
exponents: what neither overflows nor falls below the smallest number comes back bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.core.errors import RunFailed
from echelon.core.plan import Precision
from echelon.core.rulebook.precision import LOSS_SCALE_EXHAUSTED
from echelon.training.steps.part import StepPart, StepResult

LOSS_SCALE = "loss_scale"
"""Key of its history, in a position of a checkpoint."""

FIXED_PATIENCE = 20
"""Overflows in a row after which a fixed scale is given up: each of them skipped a step."""

LARGEST = 2.0**100
"""A dynamic scale does not grow beyond: a loss times it is finite in fp32, and so is the inverse.

Only gradients that are all zero let it come here.
"""

_REMEMBERED = 8  # overflows


class LossScale(StepPart):
    """Follow the overflows of a run; `value` is the factor for the next step.

    A dynamic scale halves (never below `loss_scale_min`) once `loss_scale_hysteresis` overflows
    have come since it last grew, and on each further one; it doubles after `loss_scale_window`
    steps without overflow.
    """

    def __init__(self, precision: Precision) -> None:
        """Begin a run with the scale of `precision`; 1 where it has none."""
        self._precision = precision
        self.value = precision.loss_scale if self.active else 1.0
        self.steps_since_overflow = 0
        self.hysteresis_left = precision.loss_scale_hysteresis
        self.overflows_in_a_row = 0
        self._num_steps = 0
        self._last_overflows: list[tuple[int, float]] = []

    @property
    def active(self) -> bool:
        """True if an overflow is to be expected, and its step to be skipped."""
        return self._precision.loss_scaling != "none"

    def after(self, *, overflowed: bool) -> None:
        """Take note of a step, whose gradients overflowed or did not.

        RunFailed where a smaller scale was the remedy and there is none.
        """
        assert self.active or not overflowed, "without a loss scale, an overflow ends the run"
        self._num_steps += 1
        if overflowed:
            self._overflowed()
        else:
            self._went_well()

    def end_step(self, result: StepResult) -> StepResult:
        """Take note of a step."""
        self.after(overflowed=result.skipped)
        return result

    def position(self) -> Mapping[str, Any]:
        """History of the scale."""
        return {LOSS_SCALE: self.state()}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on from the history of a run."""
        self.load(position[LOSS_SCALE])

    def state(self) -> dict[str, Any]:
        """Return what `load` needs to go on from here, as JSON."""
        return {
            "loss_scaling": self._precision.loss_scaling,
            "value": self.value,
            "steps_since_overflow": self.steps_since_overflow,
            "hysteresis_left": self.hysteresis_left,
            "overflows_in_a_row": self.overflows_in_a_row,
            "num_steps": self._num_steps,
            "last_overflows": [list(one) for one in self._last_overflows],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; a scale of another kind begins as in a new run."""
        if state["loss_scaling"] != self._precision.loss_scaling:
            return
        if self._precision.loss_scaling == "dynamic":
            self.value = max(float(state["value"]), self._precision.loss_scale_min)
        self.steps_since_overflow = int(state["steps_since_overflow"])
        self.hysteresis_left = int(state["hysteresis_left"])
        self.overflows_in_a_row = int(state["overflows_in_a_row"])
        self._num_steps = int(state["num_steps"])
        self._last_overflows = [
            (int(step), float(scale)) for step, scale in state["last_overflows"]
        ]

    def _went_well(self) -> None:
        self.overflows_in_a_row = 0
        self.steps_since_overflow += 1
        precision = self._precision
        if precision.loss_scaling != "dynamic":
            return
        if self.steps_since_overflow == precision.loss_scale_window:
            self.steps_since_overflow = 0
            self.hysteresis_left = precision.loss_scale_hysteresis
            self.value = max(self.value, min(self.value * 2, LARGEST))

    def _overflowed(self) -> None:
        precision = self._precision
        self.steps_since_overflow = 0
        self.overflows_in_a_row += 1
        seen = [*self._last_overflows, (self._num_steps, self.value)]
        self._last_overflows = seen[-_REMEMBERED:]
        if precision.loss_scaling == "fixed":
            if self.overflows_in_a_row >= FIXED_PATIENCE:
                raise self._exhausted(f"under the fixed loss scale {self.value:g}")
            return
        self.hysteresis_left = max(0, self.hysteresis_left - 1)
        if self.hysteresis_left:
            return
        if self.value <= precision.loss_scale_min:
            raise self._exhausted(f"at loss_scale_min = {precision.loss_scale_min:g} too")
        self.value = max(self.value / 2, precision.loss_scale_min)

    def _exhausted(self, where: str) -> RunFailed:
        seen = ", ".join(f"{step} (scale {scale:g})" for step, scale in self._last_overflows)
        return RunFailed(
            LOSS_SCALE_EXHAUSTED.problem(
                f"gradients overflow {where} (overflows in a row: {self.overflows_in_a_row}); "
                f"last steps that overflowed: {seen}",
                key="precision.loss_scaling",
                suggestions=("a lower optimizer.learning_rate", 'precision.parameters = "bf16"'),
            )
        )
