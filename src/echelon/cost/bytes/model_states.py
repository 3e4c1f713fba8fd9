# SPDX-License-Identifier: Apache-2.0
"""Bytes of model state a weight, by ZeRO stage: formulas for any size and degree, without a plan.

Rajbhandari et al., "ZeRO", 2020, sections 3.1 and 5: psi weights, N data ranks, Adam in mixed
precision (2 bytes of parameter, 2 of gradient, 12 of fp32 copy and two moments):

    stage 0  16 psi        stage 1  4 psi + 12 psi/N
    stage 3  16 psi/N      stage 2  2 psi + 14 psi/N

There is no figure without N: the well-known "4x, 8x" are limits for N without end. What a certain
plan holds, padding included, is `cost/bytes/held.py`; without padding the two are equal.

The weights of a model stand by what they are for (`weights_by_part`). Routed experts are apart:
`ep` ranks share them out, and N tp / ep ranks hold the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import get_args

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import EMBEDDING, HEAD, ParameterSpec, parameters
from echelon.core.plan import ZeroStage

STAGES: tuple[ZeroStage, ...] = get_args(ZeroStage)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePrecision:
    """Give the bytes that a weight takes of each kind; without `master`, parameters are updated."""

    parameters: int
    gradients: int
    master: int
    moments: int

    @property
    def optimizer(self) -> int:
        """Return the bytes that stage 1 shares out: the master copy and the moments."""
        return self.master + self.moments

    @property
    def total(self) -> int:
        """Return the bytes of a weight where nothing is shared out."""
        return self.parameters + self.gradients + self.optimizer


MIXED_PRECISION = StatePrecision(parameters=2, gradients=2, master=4, moments=8)
FP32_PRECISION = StatePrecision(parameters=4, gradients=4, master=0, moments=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """Hold the bytes of each kind that one rank holds."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Return the bytes of all kinds."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def without_optimizer(self) -> float:
        """Return what stays on the device where optimizer state is offloaded."""
        return self.parameters + self.gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationVolume:
    """Count the collectives over all weights that one step takes.

    A rank sends (N-1)/N of the weights in a reduce-scatter or an all-gather, twice that in an
    all-reduce, which is one of each.
    """

    all_reduces: int = 0
    reduce_scatters: int = 0
    all_gathers: int = 0

    @property
    def multiples(self) -> int:
        """Return what a rank sends, in units of (N-1)/N psi."""
        return 2 * self.all_reduces + self.reduce_scatters + self.all_gathers

    def sent_bytes(self, num_parameters: float, degree: float, size: int) -> float:
        """Return the bytes that one rank sends, `size` bytes a weight."""
        return self.multiples * num_parameters * size * (degree - 1) / degree


def model_states(
    num_parameters: float,
    stage: ZeroStage,
    degree: float,
    precision: StatePrecision = MIXED_PRECISION,
) -> ModelStates:
    """Return the bytes that each of `degree` data ranks holds of a model at a ZeRO stage.

    With tensor and pipeline parallelism, `num_parameters` are those of one rank's part. A `degree`
    of infinity gives the limit.
    """
    share = num_parameters / degree
    return ModelStates(
        parameters=precision.parameters * (share if stage >= 3 else num_parameters),
        gradients=precision.gradients * (share if stage >= 2 else num_parameters),
        optimizer=precision.optimizer * (share if stage >= 1 else num_parameters),
    )


def memory_saving(
    stage: ZeroStage, degree: float, precision: StatePrecision = MIXED_PRECISION
) -> float:
    """Return how many times less a rank holds than without ZeRO."""
    return precision.total / model_states(1, stage, degree, precision).total


def degree_for(
    bytes_a_weight: float, stage: ZeroStage, precision: StatePrecision = MIXED_PRECISION
) -> float | None:
    """Return the degree at which a stage takes so many bytes a weight; None where none does."""
    kept = model_states(1, stage, inf, precision).total
    shared = precision.total - kept
    if bytes_a_weight <= kept or shared == 0:
        return None
    return shared / (bytes_a_weight - kept)


def states_formula(stage: ZeroStage, precision: StatePrecision = MIXED_PRECISION) -> str:
    """Return the formula of a stage, such as ``4 psi + 12 psi/N``."""
    kept = round(model_states(1, stage, inf, precision).total)
    shared = precision.total - kept
    parts = [f"{kept} psi"] * (kept > 0) + [f"{shared} psi/N"] * (shared > 0)
    return " + ".join(parts)


def communication_volume(
    stage: ZeroStage, *, reshard_after_forward: bool = True
) -> CommunicationVolume:
    """Return the collectives of one step of one microbatch: 2, 2, 2 or 3 psi.

    Stages 1 and 2 send what stage 0 sends: its all-reduce is their reduce-scatter of gradients and
    all-gather of parameters. Stage 3 gathers for forward and again for backward, unless parameters
    stay whole in between.
    """
    if stage == 0:
        return CommunicationVolume(all_reduces=1)
    again = stage == 3 and reshard_after_forward
    return CommunicationVolume(reduce_scatters=1, all_gathers=2 if again else 1)


def largest_model(
    memory_bytes: float,
    stage: ZeroStage,
    degree: float,
    precision: StatePrecision = MIXED_PRECISION,
    *,
    optimizer_offload: bool = False,
) -> int:
    """Return the most parameters whose states fit, before activations."""
    states = model_states(1, stage, degree, precision)
    return int(memory_bytes // (states.without_optimizer if optimizer_offload else states.total))


def cheapest_stage(
    num_parameters: float,
    memory_bytes: float,
    degree: float,
    precision: StatePrecision = MIXED_PRECISION,
) -> ZeroStage | None:
    """Return the first stage whose states fit; None where none does.

    Lower stages come first: they send no more than higher ones, and stage 3 sends half as much
    again.
    """
    for stage in STAGES:
        if model_states(num_parameters, stage, degree, precision).total <= memory_bytes:
            return stage
    return None


ROUTED = "routed experts"


def weights_by_part(shape: ModelShape) -> Mapping[str, int]:
    """Return the number of weights of each part, those that a model has none of left out."""
    found: dict[str, int] = {}
    for spec in parameters(shape):
        part = _part(spec)
        found[part] = found.get(part, 0) + spec.numel
    return found


def states_of_rank(
    shape: ModelShape,
    stage: ZeroStage,
    degree: int,
    precision: StatePrecision,
    *,
    degrees: tuple[int, int, int] = (1, 1, 1),
) -> ModelStates:
    """Return the model states of one of tp x pp parts, over `degree` data ranks at a stage.

    `degrees` are tp, pp and ep. Stages are equal; routed experts are cut at the same stage, over
    the ranks that hold the same ones.
    """
    tp, pp, ep = degrees
    parts = weights_by_part(shape)
    routed = parts.get(ROUTED, 0)
    dense = model_states((sum(parts.values()) - routed) / (tp * pp), stage, degree, precision)
    alike = max(1, degree * tp // ep)
    experts = model_states(routed / (pp * ep), stage, alike, precision)
    return ModelStates(
        parameters=dense.parameters + experts.parameters,
        gradients=dense.gradients + experts.gradients,
        optimizer=dense.optimizer + experts.optimizer,
    )


def _part(spec: ParameterSpec) -> str:
    if spec.expert is not None:
        return ROUTED
    if spec.name == EMBEDDING or spec.name.startswith("positions"):
        return "embedding"
    if spec.name == HEAD:
        return "head"
    if len(spec.shape) == 1 or "norm" in spec.name:
        return "norms and biases"
    if ".router." in spec.name or ".shared." in spec.name:
        return "routers, shared"
    return "MLPs" if ".mlp." in spec.name else "attention"
