# SPDX-License-Identifier: Apache-2.0
"""The comparisons of whole tensors: gradients, updates, values, and what is rounded from them.

In the plan's own precision a gradient is rough, and Muon's orthogonalisation magnifies what is
rough, up to 500 times in directions of small singular value. So beside the comparison with the
oracle, whose tolerance must allow for that, each update is compared with what the formula makes of
the ranks' own gradients and of the values before the step, in float64: as sharp as the master
dtype. The formula is run in that dtype too: its error against itself in float64 says what the dtype
is worth, and the tolerance follows from it as in `proof/claims/tolerance.py`. What a plan adds is
the order of the optimizer's few operations.

A direction in which a gradient is zero by mathematics has rounding alone in it, in one kernel more
than in another, and Muon magnifies that too. Where an update of Muon is off by more than the
tolerance, what the formula makes of the ranks' own gradients may be as far off: those gradients,
and that the update is the formula's, are claims of their own. A vector of few elements that moves
little is off by the rounding of its values, which is bounded and not drawn.

Weights below adapters are frozen: nothing may move them, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

import torch

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.choices.registry import load_reference
from echelon.core.choices.step_parts import STEP_PARTS
from echelon.layout.stage import update_rule_of
from echelon.proof.claims.checks import Check, exact_check, relative_error, tensor_error
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.claims.tolerance import unit_roundoff
from echelon.proof.evidence.evidence import AnyEvidence, ErrorSample, measured, tensor_errors
from echelon.proof.evidence.fits import FLOOR
from echelon.proof.evidence.run import GRADIENTS, INITIAL
from echelon.proof.oracle.optimizers import (
    OptimizerState,
    clip_scale,
    global_norm,
    learning_rate,
    update,
)
from echelon.proof.oracle.oracle import TORCH_DTYPES


def gradients(evidence: AnyEvidence) -> Iterator[Check]:
    """Compare every gradient, from the last parameter to the first, as backward makes them.

    Gradients that overflowed are not numbers to compare; that the step was skipped is a claim of
    its own.
    """
    for of_step in evidence.steps:
        if not of_step.skipped:
            step = of_step.step
            wanted = {name: evidence.wanted_gradient(step, name) for name in of_step.gradients}
            yield from tensor_checks(evidence, GRADIENTS, step, wanted, backward=True)


def gradient_norms(evidence: AnyEvidence) -> Iterator[Check]:
    """Compare the norm of the whole gradient that each rank tells."""
    for of_step in evidence.steps:
        right = of_step.grad_norm
        for rank, report in enumerate(evidence.run.reports(of_step.step)):
            if (value := report.grad_norm) is None:
                continue
            # A step whose gradients overflow has no norm, on one device or on many.
            none = not math.isfinite(right) and not math.isfinite(value)
            yield Check(
                of_step.step,
                f"gradient norm of rank {rank}",
                0.0 if none else abs(value - right) / right,
                allowed=evidence.tolerance.allowed("grad_norm", of_step.step, ""),
                detail=f"{value:.10g} instead of {right:.10g}",
                position=rank,
            )


def updates(evidence: AnyEvidence) -> Iterator[Check]:
    """Compare what each step added to every value that the optimizer keeps."""
    for of_step in evidence.steps:
        added = of_step.added
        floor = FLOOR * global_norm(added)
        for position, (name, right) in enumerate(added.items()):
            error = relative_error(evidence.run.update(of_step.step, name), right, floor)
            allowed = evidence.tolerance.allowed("updates", of_step.step, name)
            yield Check(of_step.step, name, error, allowed=allowed, position=position)


def updates_of_plan(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare updates with room for what rounding may do to them, and none where a step is skipped.

    The head of this file says why.
    """
    replayed: ReplayedSteps | None = None
    optimizer, specs = evidence.plan.mathematics.optimizer, evidence.run.specs
    for check in updates(evidence):
        oracle = evidence.steps[check.step]
        if oracle.skipped:
            yield replace(check, allowed=0.0, detail="changed in a step that is skipped")
            continue
        right, allowed = oracle.added[check.subject], check.allowed
        floor = FLOOR * global_norm(oracle.added)
        if (
            not check.error <= allowed
            and _may_replay(evidence)
            and OPTIMIZERS[update_rule_of(optimizer, specs[check.subject])].needs_whole_matrices
            and check.subject not in evidence.changed_outside(check.step)
        ):
            replayed = replay(evidence, torch.float64) if replayed is None else replayed
            allowed += relative_error(replayed[check.step][check.subject], right, floor)
        if not check.error <= allowed:
            allowed += _rounding_of_value(evidence, check.step, check.subject, right, floor)
        yield replace(check, allowed=allowed)


def parameters(evidence: AnyEvidence) -> Iterator[Check]:
    """Compare parameters after the last step, their master copies, and values of step parts."""
    last = evidence.steps[-1]
    for kind in reversed(evidence.run.value_kinds):
        detail = _DETAILS.get(kind, "")
        yield from tensor_checks(evidence, kind, last.step, last.after, detail=detail)
    parts = _of_parts(evidence) if isinstance(evidence, PlanEvidence) else {}
    for kind, values in parts.items():
        for check in tensor_checks(evidence, kind, last.step, values, detail=kind):
            # They are values, too: as far off as a master copy may be.
            allowed = evidence.tolerance.allowed("masters", last.step, check.subject)
            yield replace(check, allowed=allowed)


_DETAILS = {"masters": "the master copy"}
"""How the details of a comparison name a kind of values."""


def _of_parts(evidence: PlanEvidence) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """Return what step parts keep after the last step, by kind and name."""
    steps = evidence.steps
    values = [steps[0].before, *(one.after for one in steps)]
    oracles = [record.oracle for record in STEP_PARTS.values() if record.oracle]
    kept = [load_reference(oracle)(evidence.plan, values) for oracle in oracles]
    return {kind: tensors for kinds in kept for kind, tensors in kinds.items()}


def written_back(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare every parameter with the rounding of its master copy, bit for bit."""
    observed = evidence.run
    if not observed.has_masters:
        return
    dtype = TORCH_DTYPES[evidence.plan.mathematics.precision.parameters]
    steps = (INITIAL, *(oracle.step for oracle in evidence.steps))
    for step, (position, name) in product(steps, enumerate(observed.specs)):
        master = observed.whole("masters", step, name).to(dtype)
        odd = observed.differing("parameters", step, name, master)
        problem = f"on ranks {odd} it is not the rounding of its master copy" * bool(odd)
        yield exact_check(step, name, problem, position)


def replicas(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare every copy of a value with that of its primary holder, bit for bit."""
    observed = evidence.run
    names = list(enumerate(observed.specs))
    kinds = (*observed.value_kinds, *_of_parts(evidence))
    for oracle, kind, (position, name) in product(evidence.steps, kinds, names):
        whole = observed.whole(kind, oracle.step, name)
        odd = observed.differing(kind, oracle.step, name, whole)
        problem = f"ranks {odd} differ from the primary holder" * bool(odd)
        yield exact_check(oracle.step, name, problem, position)


def tensor_checks(
    evidence: AnyEvidence,
    kind: str,
    step: int,
    wanted: Mapping[str, torch.Tensor],
    *,
    backward: bool = False,
    detail: str = "",
) -> Iterator[Check]:
    """Compare tensors of a kind with the wanted ones; `backward` counts them from the last."""
    total = global_norm(wanted)
    names = list(wanted)
    for position, name in enumerate(reversed(names) if backward else names):
        scale = max(float(wanted[name].double().norm()), FLOOR * total)
        error = tensor_error(evidence.run, kind, step, name, wanted[name])
        yield Check(
            step,
            name,
            error / scale if scale else error,
            allowed=evidence.tolerance.allowed(kind, step, name),
            detail=detail,
            position=position,
        )


def loss_scale(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare the loss scale of each step, and whether it was skipped, rank by rank."""
    did = {True: "skipped the step", False: "took the step"}
    for oracle, rank, report in evidence.reports():
        if report.skipped is not None:
            wrong = report.skipped != oracle.skipped
            problem = f"{did[report.skipped]}; one device {did[oracle.skipped]}" * wrong
            yield exact_check(oracle.step, f"decision of rank {rank}", problem, rank)
        if report.loss_scale is not None:
            error = abs(report.loss_scale - oracle.loss_scale) / oracle.loss_scale
            detail = f"{report.loss_scale:.10g} instead of {oracle.loss_scale:.10g}"
            subject = f"loss scale of rank {rank}"
            yield Check(oracle.step, subject, error, detail=detail, position=rank)


NUM_OPERATIONS = 16
"""Roundings from a gradient to a value in the longest rule, AdamW's, in whatever order."""


ReplayedSteps = Mapping[int, Mapping[str, torch.Tensor]]
"""What the updates of each step that was taken add to each value, float64."""


def replayed_updates(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare each update with the formula's; nothing in float64, where the oracle says it all."""
    if not _may_replay(evidence):
        return
    precision = evidence.plan.mathematics.precision
    exact = replay(evidence, torch.float64)
    rough = replay(evidence, TORCH_DTYPES[precision.master])
    errors: dict[tuple[str, int, str], ErrorSample] = {}
    for step, added in exact.items():
        errors.update(tensor_errors("updates", step, added, rough[step]))
    tolerance = measured([errors], NUM_OPERATIONS * unit_roundoff(precision.master), {})
    for step, updates in exact.items():
        floor = FLOOR * global_norm(updates)
        for position, (name, added) in enumerate(updates.items()):
            if name in evidence.changed_outside(step):
                continue
            error = relative_error(evidence.run.update(step, name), added, floor)
            allowed = tolerance.allowed("updates", step, name)
            if not error <= allowed:
                allowed += _rounding_of_value(evidence, step, name, added, floor)
            yield Check(step, name, error, allowed=allowed, position=position)


def replay(evidence: PlanEvidence, dtype: torch.dtype) -> ReplayedSteps:
    """Return what the formula makes of the ranks' gradients, in the arithmetic of `dtype`."""
    observed, optimizer = evidence.run, evidence.plan.mathematics.optimizer
    specs = observed.trained
    states = {name: OptimizerState() for name in specs}
    steps: dict[int, dict[str, torch.Tensor]] = {}
    for oracle in evidence.steps:
        if oracle.skipped:
            continue
        step = oracle.step
        gradients = {name: observed.whole("gradients", step, name) for name in specs}
        clip = clip_scale(global_norm(gradients), optimizer.clip_norm)
        rate = learning_rate(optimizer, step)
        added: dict[str, torch.Tensor] = {}
        for name, spec in specs.items():
            kind, before = observed.values_kind, step - 1 if step else INITIAL
            value = observed.whole(kind, before, name).to(dtype)
            gradient = gradients[name].to(dtype) * clip
            one = update(spec, value, gradient, states[name], optimizer, rate)
            added[name] = (value + one.total).double() - value.double()
        steps[step] = added
    return steps


def _rounding_of_value(
    evidence: PlanEvidence, step: int, name: str, added: torch.Tensor, floor: float
) -> float:
    """Return the most that rounding a value may change of what was added to it; 0 in float64.

    An update is seen as a difference of values, and each element of the later one is rounded once.
    A vector of few elements may have drawn less on one device.
    """
    if not evidence.tolerance.own_precision:
        return 0.0
    observed, precision = evidence.run, evidence.plan.mathematics.precision
    dtype = precision.master if observed.has_masters else precision.parameters
    value = observed.whole(observed.values_kind, step, name)
    return unit_roundoff(dtype) * float(value.norm()) / max(float(added.norm()), floor)


def _may_replay(evidence: PlanEvidence) -> bool:
    """Return whether the ranks told all that the formula needs, in a precision that is rough."""
    told = evidence.run.has_masters or not evidence.plan.mathematics.precision.has_master
    return evidence.tolerance.own_precision and told and not _overflows(evidence)


def _overflows(evidence: PlanEvidence) -> bool:
    """Return whether a rank took other steps than one device, which another claim tells."""
    return any(
        report.skipped not in (None, oracle.skipped) for oracle, _, report in evidence.reports()
    )


def frozen(evidence: PlanEvidence) -> Iterator[Check]:
    """Compare every rank's frozen values after each step with the first ones, and gradients.

    A rank must hold no gradient of what is frozen.
    """
    observed = evidence.run
    names = [
        (place, name) for place, (name, one) in enumerate(observed.specs.items()) if one.frozen
    ]
    for oracle, (position, name) in product(evidence.steps, names):
        held = observed.parts("gradients", oracle.step, name)
        problem = f"ranks {sorted({one.rank for one in held})} hold a gradient" * bool(held)
        yield exact_check(oracle.step, name, problem, position)
        for kind in observed.value_kinds:
            first = observed.whole(kind, INITIAL, name)
            moved = observed.differing(kind, oracle.step, name, first)
            problem = f"{kind} moved on ranks {moved}" * bool(moved)
            yield exact_check(oracle.step, name, problem, position)
