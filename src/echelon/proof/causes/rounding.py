# SPDX-License-Identifier: Apache-2.0
"""What low precision hides or makes: a factor within rounding, a rounded sum, an end of a dtype."""

from __future__ import annotations

from dataclasses import replace

from echelon.proof.causes.activations import describe_boundary, tensor_at
from echelon.proof.causes.factors import known_factors, name_factor
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.forward.variants import vocabulary_variants
from echelon.proof.claims.checks import Check
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.claims.systematic import PADDING, fits

_STANDARD_ERRORS = 3.0
"""Within which a known factor is the one that was fitted."""


def explain_systematic(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """The factor by which a tensor is off, next to its rounding."""
    found = list(fits(evidence))[failure.position]
    kind, name, fit = found.kind, found.name, found.fit
    dtype = evidence.plan.mathematics.precision.parameters
    if kind == PADDING:
        (variant,) = vocabulary_variants(evidence.plan)
        return replace(variant.finding, value=fit.factor, residual=fit.error)
    factor = 1 + fit.factor
    known = known_factors(evidence.plan, evidence.steps[failure.step])
    near = [one.value for one in known if abs(one.value - factor) <= _STANDARD_ERRORS * fit.error]
    named = name_factor(near[0] if near else factor, known, fit.error)
    activation = kind != "gradients"
    whose = name if not activation else describe_boundary(name)
    whose = f"the gradient of {whose}" if kind != "activations" else whose
    says = (
        f"{whose} is {factor:.5g} +- {fit.error:.1g} times that of one device in {dtype}: "
        f"a factor, not rounding"
    )
    return replace(named, description=says, tensor=tensor_at(name) if activation else name)


def explain_sum_dtype(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """Name a float32 sum that was rounded on its way."""
    says = f"{failure.detail}: the sum was rounded before it is float32"
    return ProofFinding("rounded sum", says)


def explain_range(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """Name numbers that overflow or vanish, though one device in this precision has them."""
    vanished = failure.detail.endswith("zero")
    dtype = evidence.plan.mathematics.precision.parameters
    says = f"{failure.detail}, where one device in {dtype} has numbers"
    return ProofFinding("vanished" if vanished else "not finite", says)
