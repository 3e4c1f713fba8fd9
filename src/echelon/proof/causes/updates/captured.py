# SPDX-License-Identifier: Apache-2.0
"""What a wrong optimizer state of a program looks like, and an update by another count of steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from echelon.proof.causes.factors import named_factor
from echelon.proof.causes.finding import ProofFinding, with_distinguishing_axis
from echelon.proof.claims.checks import Check
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.fits import fit_factor, relative_residual
from echelon.proof.evidence.steps import ReferenceStep

ADAM_EPSILON = 1e-8  # of the gradient's root mean square: torch's default
_COUNTS_OFF = (1, 2, -1, -2)  # steps by which a count is tried
_COUNT_FITS = 1e-4  # relative residual; another epsilon is more


def other_count(
    first: ReferenceStep, step: ReferenceStep, name: str, main: torch.Tensor, held: torch.Tensor
) -> Iterator[ProofFinding]:
    """Find Adam's update with its bias corrected for another number of steps.

    Its betas are what the first step kept of the gradient; `main` is the update without decay.
    """
    rate = step.rates.get(name, (0.0, 0.0))[0]
    keys = ("exp_avg", "exp_avg_sq")
    if not rate or any(name not in one.state.get(key, {}) for key in keys for one in (first, step)):
        return
    gradient = first.clipped(name).double().reshape(-1)
    kept = [first.state[key][name].double().reshape(-1) for key in keys]
    betas = [
        1 - fit_factor(value, one)[0]
        for value, one in zip(kept, (gradient, gradient.square()), strict=True)
    ]
    average, square = (step.state[key][name].double()[held] for key in keys)
    for off in _COUNTS_OFF:
        count = step.step + 1 + off
        if count < 1:
            continue
        corrections = [1 - beta**count for beta in betas]
        root = (square / corrections[1]).sqrt() + ADAM_EPSILON
        if relative_residual(main, -rate * average / corrections[0] / root) < _COUNT_FITS:
            says = f"the update of step number {count}, and it is number {step.step + 1}: the "
            says += f"optimizer has counted {off:+d}"
            yield ProofFinding("update count", says, value=float(off))


def explain_optimizer_state(evidence: CapturedEvidence, failure: Check) -> ProofFinding:
    """Return what is wrong with what the optimizer keeps of a parameter."""
    step, name, key = evidence.steps[failure.step], failure.subject, failure.detail
    right = step.state[key][name].double().reshape(-1)
    limit = failure.allowed * float(right.norm()) / 2
    held = {
        rank: evidence.run.vector(key, failure.step, name, rank)
        for rank in evidence.run.holders(key, failure.step, name)
    }
    wrong = [
        rank for rank, one in held.items() if not float((one - right)[~one.isnan()].norm()) <= limit
    ]
    rank = (wrong or list(held))[0]
    mine = ~held[rank].isnan()
    finding = _state_finding(evidence, step, (name, key), held[rank][mine], mine)
    finding = replace(finding, ranks=tuple(sorted(wrong or held)))
    return with_distinguishing_axis(evidence.axes(), finding, wrong or list(held), held)


def _state_finding(
    evidence: CapturedEvidence,
    step: ReferenceStep,
    what: tuple[str, str],
    seen: torch.Tensor,
    mine: torch.Tensor,
) -> ProofFinding:
    name, key = what
    right = step.state[key][name].double().reshape(-1)[mine]
    if not bool(seen.isfinite().all()):
        return ProofFinding("not finite", f"{key} is not finite")
    if not float(seen.norm()):
        return ProofFinding("zero", f"{key} is zero", value=0.0)
    if step.step:
        old = evidence.steps[step.step - 1].state[key][name].double().reshape(-1)[mine]
        if relative_residual(seen, old) < evidence.explained:
            return ProofFinding("stale", f"{key} is that of the step before")
        gradient = evidence.wanted_gradient(step.step, name).reshape(-1)[mine]
        fresh = gradient.square() if key == "exp_avg_sq" else gradient
        factor, residual = fit_factor(seen, fresh)
        if residual < evidence.explained:
            says = f"{key} is of this step's gradient alone ({factor:.4g} times it): what was kept "
            return ProofFinding("lost", says + "before is lost", value=factor)
    factor, residual = fit_factor(seen, right)
    if residual < evidence.explained:
        told = named_factor(evidence, step, factor, residual)
        says = f"{key} is {told.description}"
        return ProofFinding(told.factor, says, told.axis, value=factor, residual=residual)
    return ProofFinding("none", f"{key} is another than that of one device")
