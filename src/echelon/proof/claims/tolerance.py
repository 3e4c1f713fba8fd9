# SPDX-License-Identifier: Apache-2.0
"""How far a correct plan may be from the oracle.

Float64: 1e-10, about 1e5 times what reordering the sums of a shrunk model leaves (1e-15 to 1e-13)
and far below any wrong factor; fixed, the same for every plan. A few models enlarge a rounding so
much that a right plan is further off; what that is worth is measured then (`conditioning.py`).

Own precision: the oracle is run again, on one device, in the plan's precision: parameters,
gradients, their sums over microbatches and replicas, and master values in the dtypes of the plan.
Its own error against float64 says what that precision is worth for this model. It is drawn eight
times, with losses that are 2^(i/8) times as large: the same gradients, rounded otherwise. The plan
may be off by

    4 x the largest of the one device's errors in this tensor,
                       their root mean square over this parameter of all blocks in all steps,
                       their root mean square over all tensors in this step
    + (number of partial sums) x unit roundoff.

A plan's error and the one device's are draws of rounding errors of the same size. A draw can be
small by luck: that of a short vector, and that of all tensors together whose errors come from one
rounding upstream of them. Of eight draws and one more, the last is more than 4 times the largest of
the others once in 10,000 times even so; the means are over draws of the same kind. What is zero by
mathematics (the gradient of a key bias) has no error relative to itself and is left out of the mean
over all tensors. The last term is what a plan adds: each partial sum (over microbatches, data and
tensor ranks, and at each stage boundary) is rounded once more.

The unit roundoff u is that of the coarsest dtype that a number goes through: for losses, gradients
and updates the coarsest of the plan. A value that is kept in a finer dtype meets the coarse one
only through what was added to it, so it is off by the larger of u of the master dtype and
u of the coarsest x (length of all updates / length of the value); with bfloat16 parameters that is
a few 1e-5 instead of a few 1e-3, and an update that is lost or done twice shows. The parameter
that is rounded from it is off by one more rounding, half a unit in its last place: not 4 of them,
not one per partial sum.

Of a model with experts both runs send each token where the plan's ranks sent it. Scores and gates
have no norm: the error of a layer is the largest of any token and expert, and 2 times, not 4, is
enough, for a largest of hundreds is no matter of luck. Their u is that of the parameters, times
the largest score, and only the partial sums of a forward count.

What the optimizer makes of a gradient is judged more sharply than the gradient can be: see
`proof/claims/value_checks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from echelon.core.plan import DType, Plan
from echelon.models.precision import LOW_PRECISION
from echelon.proof.evidence.evidence import ErrorSample, Tolerance, measured, tensor_errors
from echelon.proof.oracle.operations import ForcedRouting
from echelon.proof.oracle.oracle import TORCH_DTYPES, OracleStep, run_oracle

FACTORS = tuple(2 ** (index / 8) for index in range(8))
"""What the loss is multiplied by in each draw: mantissas are spread over a whole octave."""

_Key = tuple[str, int, str]

_Tensors = Mapping[str, torch.Tensor]


def own_tolerance(
    plan: Plan,
    reference: Sequence[OracleStep],
    one_device: Sequence[Sequence[OracleStep]],
    *,
    has_masters: bool,
) -> Tolerance:
    """Return the tolerance of a proof in the plan's precision.

    `reference` is the oracle in float64, `one_device` the same in the plan's precision, several
    times (`rounded_oracle_runs`). Where the ranks tell their master values, updates are seen
    there; else in the rounded parameters.
    """
    runs = [run_errors(plan, reference, run, has_masters=has_masters) for run in one_device]
    flats = _value_flats(plan, reference) | _score_flats(plan, reference)
    flats |= _activation_flats(plan, reference)
    return measured(runs, num_partial_sums(plan) * roundoff(plan), flats)


def run_errors(
    plan: Plan,
    reference: Sequence[OracleStep],
    run: Sequence[OracleStep],
    *,
    has_masters: bool,
) -> dict[_Key, ErrorSample]:
    """Return how far off a run of the one device is, for everything that is compared."""
    return {
        key: sample
        for exact, rough in zip(reference, run, strict=True)
        for key, sample in _errors(plan, exact, rough, has_masters=has_masters)
    }


def rounded_oracle_runs(
    plan: Plan, num_steps: int, forced: Sequence[ForcedRouting] | None = None
) -> list[tuple[OracleStep, ...]]:
    """Return the oracle in the plan's precision, rounded in several ways."""
    return [run_oracle(plan, num_steps, factor=factor, forced=forced) for factor in FACTORS]


def roundoff(plan: Plan) -> float:
    """Return the unit roundoff of the coarsest dtype of the plan."""
    precision = plan.mathematics.precision
    names = (precision.parameters, precision.gradients, precision.reduction, precision.master)
    return max(unit_roundoff(name) for name in names)


def unit_roundoff(dtype: DType) -> float:
    """Return the largest relative error of one rounding to `dtype`."""
    return torch.finfo(TORCH_DTYPES[dtype]).eps / 2


def num_partial_sums(plan: Plan) -> int:
    """Return how many more roundings an element meets than on one device."""
    mesh = plan.mesh
    return mesh.dp * plan.num_microbatches + mesh.cp + mesh.tp + plan.num_stages


def _value_flats(plan: Plan, reference: Sequence[OracleStep]) -> dict[_Key, float]:
    """Return what a plan may add to the error of each value: of masters, and rounded from them."""
    precision, count = plan.mathematics.precision, num_partial_sums(plan)
    kept, coarse = unit_roundoff(precision.master), roundoff(plan)
    rounding = unit_roundoff(precision.parameters) if precision.has_master else 0.0
    moved = dict.fromkeys(reference[0].before, 0.0)
    flats: dict[_Key, float] = {}
    for exact in reference:
        for name, update in exact.updates.items():
            moved[name] += float(update.total.norm())
            length = float(exact.after[name].norm())
            share = moved[name] / length if length else 1.0
            flat = count * max(kept, coarse * min(share, 1.0))
            flats["masters", exact.step, name] = flat
            flats["parameters", exact.step, name] = flat + rounding
    return flats


def _activation_flats(plan: Plan, reference: Sequence[OracleStep]) -> dict[_Key, float]:
    """Return what a plan may add to the error of an activation: the sums of a forward pass."""
    flat = _num_forward_sums(plan) * unit_roundoff(plan.mathematics.precision.parameters)
    return {
        ("activations", exact.step, name): flat for exact in reference for name in exact.activations
    }


def _num_forward_sums(plan: Plan) -> int:
    """Return how many more roundings an element meets in a forward pass than on one device."""
    return plan.mesh.cp + plan.mesh.tp + plan.num_stages


def _score_flats(plan: Plan, reference: Sequence[OracleStep]) -> dict[_Key, float]:
    """Return what a plan may add to the error of a score or gate: a forward has fewer sums."""
    share = _num_forward_sums(plan) * unit_roundoff(plan.mathematics.precision.parameters)
    flats: dict[_Key, float] = {}
    for exact in reference:
        for layer, routed in exact.routed.items():
            name = f"layers.{layer}"
            flats["scores", exact.step, name] = share * float(routed.wanted_BTE.abs().max())
            flats["gates", exact.step, name] = share * float(routed.gates_BTK.max())
    return flats


def _errors(
    plan: Plan, exact: OracleStep, rough: OracleStep, *, has_masters: bool
) -> Iterator[tuple[_Key, ErrorSample]]:
    step = exact.step
    for slot, (total, _) in exact.microbatch_losses.items():
        yield ("losses", step, str(slot)), _scalar(rough.microbatch_losses[slot][0], total)
    yield ("loss", step, ""), _scalar(rough.loss, exact.loss)
    yield from _routing_errors(exact, rough)
    for kind, right, seen in _passing(exact, rough):
        yield from tensor_errors(kind, step, right, seen)
    if not exact.skipped and not rough.skipped:
        yield ("grad_norm", step, ""), _scalar(rough.grad_norm, exact.grad_norm)
        seen = _differences(plan, rough, rounded=not has_masters)
        yield from tensor_errors("updates", step, _differences(plan, exact, rounded=False), seen)
    yield from tensor_errors("masters", step, exact.after, rough.after)
    yield from tensor_errors("parameters", step, exact.after, _rounded(plan, rough.after))


def is_low(plan: Plan) -> bool:
    """Return whether parameters have few digits."""
    return TORCH_DTYPES[plan.mathematics.precision.parameters] in LOW_PRECISION


def _passing(exact: OracleStep, rough: OracleStep) -> Iterator[tuple[str, _Tensors, _Tensors]]:
    """Yield what a forward and a backward pass make, by kind: right, and as one device has it."""
    yield "activations", exact.activations, rough.activations
    if not exact.skipped and not rough.skipped:
        yield "activation gradients", exact.activation_gradients, rough.activation_gradients
        yield "gradients", exact.gradients, rough.gradients


def _routing_errors(exact: OracleStep, rough: OracleStep) -> Iterator[tuple[_Key, ErrorSample]]:
    """Return how far off scores, gates and losses of routers are, of the same choices."""
    for layer, right in exact.routed.items():
        other, name = rough.routed[layer], f"layers.{layer}"
        for kind, of in (("scores", "wanted_BTE"), ("gates", "gates_BTK")):
            off = getattr(other, of).double() - getattr(right, of).double()
            yield (kind, exact.step, name), (float(off.abs().max()), False)
        for kind in ("aux_loss", "z_loss"):
            wanted = getattr(right, kind)
            if wanted:
                yield (kind, exact.step, name), _scalar(getattr(other, kind), wanted)


def _rounded(plan: Plan, values: _Tensors) -> dict[str, torch.Tensor]:
    dtype = TORCH_DTYPES[plan.mathematics.precision.parameters]
    return {name: value.to(dtype) for name, value in values.items()}


def _differences(plan: Plan, oracle: OracleStep, *, rounded: bool) -> dict[str, torch.Tensor]:
    # As the prover sees updates: a difference of rounded values.
    before, after = oracle.before, oracle.after
    if rounded:
        before, after = _rounded(plan, before), _rounded(plan, after)
    return {name: after[name].double() - before[name].double() for name in after}


def _scalar(rough: float, exact: float) -> ErrorSample:
    return abs(rough - exact) / abs(exact), False
