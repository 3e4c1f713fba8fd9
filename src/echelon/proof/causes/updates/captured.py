# SPDX-License-Identifier: Apache-2.0
"""What a wrong update or optimizer state of a program looks like, its gradient being right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from echelon.proof.causes.factors import named_on_mesh
from echelon.proof.causes.finding import ProofFinding, with_distinguishing_axis
from echelon.proof.claims.checks import Check
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.fits import fit_basis, fit_factor, relative_residual
from echelon.proof.evidence.run import INITIAL, PARAMETERS
from echelon.proof.evidence.steps import ReferenceStep

ADAM_EPSILON = 1e-8  # of the gradient's root mean square: torch's default
_COUNTS_OFF = (1, 2, -1, -2)  # steps by which a count is tried
_COUNT_FITS = 1e-4  # relative residual; another epsilon is more


def explain_update(evidence: CapturedEvidence, failure: Check) -> ProofFinding:
    """Return what is wrong with what a step added to a parameter."""
    step, name = evidence.steps[failure.step], failure.subject
    right = step.update(name).reshape(-1)
    before = failure.step - 1 if failure.step else INITIAL
    seen = {
        rank: evidence.run.vector(PARAMETERS, failure.step, name, rank)
        - evidence.run.vector(PARAMETERS, before, name, rank)
        for rank in evidence.run.holders(PARAMETERS, failure.step, name)
    }
    limit = max(failure.allowed, evidence.explained) * float(right.norm()) / 2
    wrong = [
        rank for rank, one in seen.items() if not float((one - right)[~one.isnan()].norm()) <= limit
    ]
    rank = (wrong or list(seen))[0]
    held = ~seen[rank].isnan()
    finding = next(_update_findings(evidence, step, name, seen[rank][held], held), None)
    says = "another update of the right gradient: no factor of it, and no decay, explains it"
    finding = finding or ProofFinding("none", says)
    finding = replace(finding, ranks=tuple(sorted(wrong or seen)))
    return with_distinguishing_axis(evidence.axes(), finding, wrong or list(seen), seen)


def _update_findings(
    evidence: CapturedEvidence,
    step: ReferenceStep,
    name: str,
    seen: torch.Tensor,
    held: torch.Tensor,
) -> Iterator[ProofFinding]:
    right = step.update(name).reshape(-1)[held]
    value = step.before[name].double().reshape(-1)[held]
    rate, decay = step.rates.get(name, (0.0, 0.0))
    fits = max(evidence.explained, 1e-6)
    if not bool(seen.isfinite().all()):
        yield ProofFinding("not finite", "not finite")
        return
    if not float(seen.norm()):
        yield ProofFinding("zero", "not updated at all", value=0.0)
        return
    factor, residual = fit_factor(seen, right)
    if residual < fits:
        yield _rate(evidence, step, factor, residual)
    # AdamW and SGD: the update is what the gradient makes of it and -rate x decay x value.
    main = right + rate * decay * value
    weights, residual = fit_basis(seen, (main, value))
    if rate and residual < fits:
        found = -weights[1] / rate
        if abs(weights[0] - 1) < fits:
            says = f"weight decay is {found:.4g} instead of {decay:.4g}"
            yield ProofFinding("weight decay", says, value=found, residual=residual)
        elif abs(found - weights[0] * decay) < fits:
            yield _rate(evidence, step, weights[0], residual)
        else:
            says = f"{weights[0]:.6g} times the right update, with a decay of {found:.4g} "
            says += f"instead of {decay:.4g}"
            yield ProofFinding("rate and decay", says, value=weights[0], residual=residual)
    yield from _other_count(evidence, step, name, seen + rate * decay * value, held)
    signs = relative_residual(seen.sign(), right.sign())
    if signs < fits:
        says = "of the right sign and another size: another epsilon, beta, or count of steps"
        yield ProofFinding("other size", says)


def _other_count(
    evidence: CapturedEvidence,
    step: ReferenceStep,
    name: str,
    main: torch.Tensor,
    held: torch.Tensor,
) -> Iterator[ProofFinding]:
    """Find Adam's update with its bias corrected for another number of steps.

    Its betas are what the first step kept of the gradient; `main` is the update without decay.
    """
    first, rate = evidence.steps[0], step.rates.get(name, (0.0, 0.0))[0]
    keys = ("exp_avg", "exp_avg_sq")
    if not rate or any(name not in one.state.get(key, {}) for key in keys for one in (first, step)):
        return
    gradient = first.clipped(name).double().reshape(-1)
    kept = [first.state[key][name].double().reshape(-1) for key in keys]
    betas = [
        1 - fit_factor(value, one)[0]
        for value, one in zip(kept, (gradient, gradient.square()), strict=True)
    ]
    average, square = (step.state[key][name].double().reshape(-1)[held] for key in keys)
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


def _rate(
    evidence: CapturedEvidence, step: ReferenceStep, factor: float, residual: float
) -> ProofFinding:
    told = named_on_mesh(evidence, step, factor, residual)
    says = f"{factor:.6g} times the right update: another learning rate, or it is made again"
    if told.factor != "number":
        says += f" ({told.factor})"
    return ProofFinding(told.factor, says, told.axis, value=factor, residual=residual)


def explain_state(evidence: CapturedEvidence, failure: Check) -> ProofFinding:
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
        told = named_on_mesh(evidence, step, factor, residual)
        says = f"{key} is {told.description}"
        return ProofFinding(told.factor, says, told.axis, value=factor, residual=residual)
    return ProofFinding("none", f"{key} is another than that of one device")
