# SPDX-License-Identifier: Apache-2.0
"""Gradients of a program, judged where they count: an optimizer may reduce and clip in its step.

ZeRO by hand gives each rank's own gradients to its optimizer, which reduces them. No hook sees the
sum. The update shows it: where values, copies and optimizer state are right after the step, the
gradient behind them was right. An optimizer of other tensors, such as one flat slice of all
parameters, takes no gradient of theirs. The claim on updates judges those that move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from echelon.proof.claims import value_checks
from echelon.proof.claims.checks import Check, tensor_error
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.fits import FLOOR, fit_factor
from echelon.proof.evidence.run import GRADIENTS, INITIAL, PARAMETERS, ReferenceStep
from echelon.proof.oracle.optimizers import global_norm

BY_UPDATE = "judged by its update"
"""Detail of the check of such a gradient."""


def gradients(evidence: CapturedEvidence) -> Iterator[Check]:
    """Compare every gradient that an optimizer takes; a wrong one is judged by its update."""
    for check in value_checks.gradients(evidence):
        wrong, step = not check.error <= check.allowed, evidence.steps[check.step]
        if wrong and (error := error_of_update(evidence, step, check.subject)) is not None:
            allowed = evidence.tolerance.allowed("updates", check.step, check.subject)
            yield replace(check, error=error, allowed=allowed, detail=BY_UPDATE)
        elif not moves_untaken(evidence, check.step, check.subject):
            yield check


def by_update_note(_: CapturedEvidence, checks: Sequence[Check]) -> str:
    """Return how many gradients were judged by their updates."""
    count = sum(check.detail == BY_UPDATE for check in checks)
    return f"{count} by their updates" if count else ""


def error_of_update(evidence: CapturedEvidence, step: ReferenceStep, name: str) -> float | None:
    """Return the error of the update of a tensor; None unless it proves that its gradient is right.

    All copies of the value must be right after the step, and the optimizer state that is captured.
    """
    if not float(step.parts_of_update(name)[0].norm()) or not _state_tells(evidence, step, name):
        return None
    run, before = evidence.run, step.step - 1 if step.step else INITIAL
    right = step.update(name).reshape(-1)
    scale = max(float(right.norm()), FLOOR * global_norm(step.added))
    allowed = evidence.tolerance.allowed("updates", step.step, name)
    after = run.vectors(PARAMETERS, step.step, name)
    added = [value - run.vector(PARAMETERS, before, name, rank) for rank, value in after.items()]
    if not added or bool(run.whole(PARAMETERS, step.step, name).isnan().any()):
        return None
    errors = [float((one - right)[~one.isnan()].norm()) / scale for one in added]
    return max(errors) if max(errors) <= allowed else None


def moves_untaken(evidence: CapturedEvidence, step: int, name: str) -> bool:
    """Return whether a value moves in a step though no optimizer was seen taking its gradient."""
    run = evidence.run
    return not run.parts(GRADIENTS, step, name) and bool(run.update(step, name).any())


def _state_tells(evidence: CapturedEvidence, step: ReferenceStep, name: str) -> bool:
    """Return whether optimizer state lets the update tell a right gradient from a wrong one.

    Adam forgives a constant factor. What it keeps does not; float64 shows the factor beside its
    epsilon.
    """
    run = evidence.run
    kept = {key: values[name] for key, values in step.state.items() if name in values}
    held = {key: value for key, value in kept.items() if run.parts(key, step.step, name)}
    for key, value in held.items():
        allowed = evidence.tolerance.allowed(key, step.step, name) * float(value.double().norm())
        if not tensor_error(run, key, step.step, name, value) <= allowed:
            return False
    return (
        bool(held)
        or not kept
        or not evidence.tolerance.own_precision
        or not _is_multiple(evidence, step, name)
    )


def _is_multiple(evidence: CapturedEvidence, step: ReferenceStep, name: str) -> bool:
    """Return whether some rank takes the right gradient, times a factor."""
    right = evidence.wanted_gradient(step.step, name).reshape(-1)
    for value in evidence.run.vectors(GRADIENTS, step.step, name).values():
        held = ~value.isnan()
        if bool(held.any()) and fit_factor(value[held], right[held])[1] <= evidence.explained:
            return True
    return not bool(torch.isfinite(right).all())
