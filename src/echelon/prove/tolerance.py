"""How far a correct plan may be from the oracle.

Float64: 1e-10, about 1e5 times what reordering the sums of a shrunk model leaves (1e-15 to 1e-13)
and far below any wrong factor; fixed, the same for every plan.

Own precision: the oracle is run once more, on one device, in the plan's precision. Its own error
against float64 says what that precision is worth for this model. The plan may be off by

    4 x the largest of the one device's error in this tensor,
                       its root mean square over this parameter of all blocks in all steps,
                       its root mean square over all tensors in this step
    + (number of partial sums) x unit roundoff.

A plan's error and the one device's are two draws of rounding errors of the same size, but a draw
can be small by luck, most easily that of a short vector: hence the means over draws of the same
kind, and the factor 4 for the largest ratio among hundreds of tensors. The last term is what a
plan adds: each partial sum (over microbatches, data and tensor ranks, and at each stage boundary)
is rounded once more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from echelon.core.plan import Plan
from echelon.prove.oracle import TORCH_DTYPES, OracleStep

FLOAT64_TOLERANCE = 1e-10
"""The relative error that a plan may have in float64."""

FLOOR = 1e-4
"""The part of the norm of all tensors below which a tensor's error is not relative to itself."""

_LUCK = 4.0

_Key = tuple[str, int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Give the error that is allowed for each thing compared.

    `one_device` holds the one-device error of each (kind, step, name), `typical` its root mean
    square per (kind, step) and `family` per (kind, parameter of all blocks); empty in float64.
    """

    flat: float
    one_device: Mapping[_Key, float]
    typical: Mapping[tuple[str, int], float]
    family: Mapping[tuple[str, str], float]

    @property
    def own_precision(self) -> bool:
        """Return whether this is not the tolerance of float64."""
        return bool(self.one_device)

    def allowed(self, kind: str, step: int, name: str) -> float:
        """Return the relative error that is allowed."""
        draws = (
            self.one_device.get((kind, step, name), 0.0),
            self.family.get((kind, family_of(name)), 0.0),
            self.typical.get((kind, step), 0.0),
        )
        return _LUCK * max(draws) + self.flat


def float64_tolerance() -> Tolerance:
    """Return the tolerance of a proof in float64."""
    return Tolerance(flat=FLOAT64_TOLERANCE, one_device={}, typical={}, family={})


def own_tolerance(
    plan: Plan, reference: Sequence[OracleStep], one_device: Sequence[OracleStep]
) -> Tolerance:
    """Return the tolerance of a proof in the plan's precision.

    `reference` is the oracle in float64, `one_device` the same in the plan's precision.
    """
    errors: dict[_Key, float] = {}
    for exact, rough in zip(reference, one_device, strict=True):
        errors.update(_errors(exact, rough))
    by_step: dict[tuple[str, int], list[float]] = {}
    by_family: dict[tuple[str, str], list[float]] = {}
    for (kind, step, name), error in errors.items():
        by_step.setdefault((kind, step), []).append(error)
        by_family.setdefault((kind, family_of(name)), []).append(error)
    typical = {key: _root_mean_square(values) for key, values in by_step.items()}
    # A single number is a draw of its own: the losses of the microbatches say what it is worth.
    for step in range(len(reference)):
        typical["loss", step] = typical["losses", step]
        typical["grad_norm", step] = typical["gradients", step]
    return Tolerance(
        flat=num_partial_sums(plan) * roundoff(plan),
        one_device=errors,
        typical=typical,
        family={key: _root_mean_square(values) for key, values in by_family.items()},
    )


def family_of(name: str) -> str:
    """Return the name of a parameter without its block."""
    return re.sub(r"^layers\.\d+\.", "layers.*.", name)


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def roundoff(plan: Plan) -> float:
    """Return the unit roundoff of the coarsest dtype of the plan."""
    precision = plan.mathematics.precision
    names = (precision.parameters, precision.gradients, precision.reduction, precision.master)
    return max(torch.finfo(TORCH_DTYPES[name]).eps / 2 for name in names)


def num_partial_sums(plan: Plan) -> int:
    """Return how many more roundings an element meets than on one device."""
    mesh = plan.mesh
    return mesh.dp * plan.num_microbatches + mesh.cp + mesh.tp + plan.num_stages


def _errors(exact: OracleStep, rough: OracleStep) -> Iterator[tuple[_Key, float]]:
    step = exact.step
    for slot, (total, _) in exact.microbatch_losses.items():
        yield ("losses", step, str(slot)), _scalar(rough.microbatch_losses[slot][0], total)
    yield ("loss", step, ""), _scalar(rough.loss, exact.loss)
    yield ("grad_norm", step, ""), _scalar(rough.grad_norm, exact.grad_norm)
    yield from _tensors("gradients", step, exact.gradients, rough.gradients)
    yield from _tensors("updates", step, _updates(exact), _updates(rough))
    yield from _tensors("parameters", step, exact.after, rough.after)


def _updates(oracle: OracleStep) -> dict[str, torch.Tensor]:
    # As the prover sees them: a difference of rounded parameters.
    return {name: oracle.after[name] - oracle.before[name] for name in oracle.after}


def _scalar(rough: float, exact: float) -> float:
    return abs(rough - exact) / abs(exact)


def _tensors(
    kind: str, step: int, exact: Mapping[str, torch.Tensor], rough: Mapping[str, torch.Tensor]
) -> Iterator[tuple[_Key, float]]:
    total = math.sqrt(sum(float(value.square().sum()) for value in exact.values()))
    for name, value in exact.items():
        error = float((rough[name].double() - value).norm())
        yield (kind, step, name), error / max(float(value.norm()), FLOOR * total)
