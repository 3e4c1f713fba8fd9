# SPDX-License-Identifier: Apache-2.0
"""The expected seconds of a step in a long run: interruptions, restarts, and the risk of memory.

A plan that is fastest while it runs is not the one that is done first where it interrupts more, on
more devices, or may not fit. The formulas are those of `cost/seconds/interruptions.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import num_active_parameters, num_trained_parameters
from echelon.cost.inputs.cost_inputs import TrainerConstants
from echelon.cost.inputs.numbers import first_number
from echelon.cost.seconds.interruptions import (
    Interruptions,
    checkpoint_bytes,
    interruptions,
    retry_seconds,
    risk_slowdown,
    run_steps,
)
from echelon.planner.predict.bands import fit_probability
from echelon.planner.predict.estimate import Estimate

_DAY_S = 86400.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedStep:
    """Hold what a step is expected to take in a long run, and of what that is made."""

    devices: int
    """Devices that the plan takes."""
    step_s: float
    """Seconds of a step that nothing interrupts."""
    tokens: int
    """Tokens of a step."""
    steps: float
    """Steps of the run."""
    fits: float
    """Probability that the plan fits."""
    checkpoint_bytes: float
    """Bytes of a checkpoint."""
    interruptions: Interruptions
    """How the run is interrupted."""

    @property
    def slowdown(self) -> float:
        """Return by how many times interruptions and checkpoints make the run longer."""
        return self.interruptions.slowdown

    @property
    def risk(self) -> float:
        """Return by how many times the plan that would follow makes the run longer."""
        return risk_slowdown(self.fits)

    @property
    def retry_s(self) -> float:
        """Return what having tried a plan for nothing costs each step."""
        return retry_seconds(self.fits, self.steps)

    @property
    def total_s(self) -> float:
        """Return the expected seconds of a step."""
        return self.step_s * self.slowdown * self.risk + self.retry_s

    @property
    def tokens_per_day(self) -> float:
        """Return the tokens of an expected day."""
        return self.tokens * _DAY_S / self.total_s


def expected_step(estimate: Estimate, model: ModelShape, memory_bytes: float) -> ExpectedStep:
    """Return what a step of a plan is expected to take in a run of its model."""
    software = estimate.inputs.software
    return ExpectedStep(
        devices=estimate.devices,
        step_s=estimate.step_s,
        tokens=estimate.tokens,
        steps=run_steps(_weights(model)[1], estimate.tokens),
        fits=fit_probability(estimate, memory_bytes),
        checkpoint_bytes=_checkpoint_bytes(model, software),
        interruptions=interruptions_of_run(model, software, estimate.devices),
    )


def interruptions_of_run(
    model: ModelShape, software: TrainerConstants, devices: int
) -> Interruptions:
    """Return how a run of a model on so many devices is interrupted."""
    return interruptions(devices, _checkpoint_bytes(model, software))


def _checkpoint_bytes(model: ModelShape, software: TrainerConstants) -> float:
    # Frozen weights are written once in a run, adapters in each checkpoint.
    return checkpoint_bytes(_weights(model)[0], first_number(software.state_bytes))


@lru_cache(maxsize=8)
def _weights(model: ModelShape) -> tuple[int, int]:
    """Return the weights of a model that are trained, and all that a token meets."""
    return num_trained_parameters(model), num_active_parameters(model)
