# SPDX-License-Identifier: Apache-2.0
"""From the first difference of the oracle and the independent implementation to a name for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from echelon.core.plan import Plan
from echelon.proof.causes.finding import Diagnosis, ProofFinding
from echelon.proof.claims.checks import Check
from echelon.proof.claims.claims import ClaimResult, first_failure
from echelon.proof.evidence.fits import EXPLAINED, fit_factor
from echelon.proof.independent import comparison
from echelon.proof.independent.comparison import TwoRuns
from echelon.proof.independent.hugging_face.beside import (
    first_part_unlike_transformers,
    why_not_beside,
)
from echelon.proof.independent.optimizers import decays
from echelon.proof.independent.parts import LOSS, SAME, first_different_part, forward_from
from echelon.proof.independent.weights import weights_of
from echelon.proof.oracle.losses import router_loss_gradient
from echelon.proof.oracle.oracle import OracleStep
from echelon.proof.verdict import ProofPass

INITIAL_VALUES = "initial values"
WEIGHT_DECAY = "weight decay"
LEARNING_RATE = "learning rate"
TIED_HEAD = "tied head"
AUXILIARY = "auxiliary loss"
BACKWARD = "backward pass"
UPDATE = "update of the optimizer"

_PARTS = {
    comparison.RATES: LEARNING_RATE,
    comparison.FIRST_VALUES: INITIAL_VALUES,
    comparison.DECAY: WEIGHT_DECAY,
}
"""The part that a comparison is about, where it is about one."""


def independent_pass(plan: Plan, num_steps: int) -> ProofPass:
    """Compare the oracle of a shrunk float64 plan with the independent implementation."""
    runs = TwoRuns.of(plan, num_steps)
    claims = comparison.compare(runs)
    return ProofPass(
        precision="fp64",
        claims=claims,
        diagnosis=_diagnosis(runs, claims),
        note=why_not_beside(plan),
    )


def _diagnosis(runs: TwoRuns, claims: Sequence[ClaimResult]) -> Diagnosis | None:
    first = first_failure(claims)
    if first is None:
        return None
    claim, failure = first
    part, tensor, says = _named(runs, claim.statement, failure)
    finding = ProofFinding("", says, tensor=tensor, residual=failure.error)
    return Diagnosis.of(claim, failure, finding, part)


def _named(runs: TwoRuns, statement: str, failure: Check) -> tuple[str, str, str]:
    """Return the part at fault, the tensor (or unit, or number) that shows it, and what is seen."""
    subject, detail = failure.subject, failure.detail or f"off by {failure.error:.2g}"
    match statement:
        case comparison.OWN_BATCHES | comparison.TRAINER_BATCHES:
            whose = "the proof" if statement == comparison.OWN_BATCHES else "the trainer"
            named = subject, f"batches of {whose}", detail
        case comparison.ROUTES | comparison.LOSSES:
            named = _of_forward(runs, failure)
        case comparison.BALANCE:
            part, _, unit = subject.rpartition(" of ")
            named = part, unit, detail
        case comparison.GRADIENTS:
            named = _of_gradient(runs, failure)
        case comparison.TRANSFORMERS:
            named = _beside_transformers(runs, failure)
        case comparison.NORMS:
            named = subject, f"step {failure.step}", detail
        case comparison.UPDATES | comparison.PARAMETERS:
            named = _of_update(runs, failure)
        case _:
            named = _PARTS[statement], subject, detail
    return named


def _of_forward(runs: TwoRuns, failure: Check) -> tuple[str, str, str]:
    step = failure.step
    found = first_different_part(runs.plan, runs.oracle[step], runs.batches[step])
    if found is None:
        return LOSS, failure.subject, failure.detail
    return found.part, found.unit, found.says


def _beside_transformers(runs: TwoRuns, failure: Check) -> tuple[str, str, str]:
    """Name what transformers computes otherwise than both implementations here."""
    step = failure.step
    found = first_part_unlike_transformers(runs.plan, runs.oracle[step], runs.batches[step])
    if found is None:
        return BACKWARD, failure.subject, f"off by {failure.error:.2g} beside transformers"
    return found.part, found.unit, found.says


def _of_gradient(runs: TwoRuns, failure: Check) -> tuple[str, str, str]:
    """Name a gradient that differs though every loss agrees."""
    oracle, name = runs.oracle[failure.step], failure.subject
    wrong = {
        one.subject
        for one in comparison.gradient_checks(runs)
        if one.step == failure.step and not one.error <= one.allowed
    }
    if runs.plan.model.tied and wrong == {"embedding.weight"}:
        return TIED_HEAD, name, f"off by {failure.error:.2g}; all other gradients agree"
    if runs.plan.model.experts is not None and _router_losses_differ(runs, oracle, wrong):
        return AUXILIARY, name, f"off by {failure.error:.2g} in what routers add to the loss"
    right = runs.independent[failure.step].gradients[name]
    factor, residual = fit_factor(oracle.gradients[name], right)
    times = f"{factor:.6g} times the right one" if residual < EXPLAINED else ""
    return BACKWARD, name, times or f"off by {failure.error:.2g}; every loss agrees"


def _router_losses_differ(runs: TwoRuns, oracle: OracleStep, wrong: set[str]) -> bool:
    """Return whether what routers add has another gradient in the weights of some router."""
    plan, step = runs.plan, oracle.step
    leaves = {name: value.detach().requires_grad_() for name, value in oracle.before.items()}
    passed = forward_from(plan, oracle, runs.batches[step], leaves)
    for name in sorted(name for name in wrong if name.endswith("router.weight")):
        found = router_loss_gradient(plan, oracle, name)
        if not passed.beside.requires_grad:
            return found is not None
        (right,) = torch.autograd.grad(passed.beside, leaves[name], retain_graph=True)
        if found is None or float((found - right).norm()) > SAME * float(right.norm()):
            return True
    return False


def _of_update(runs: TwoRuns, failure: Check) -> tuple[str, str, str]:
    """Name an update that differs though the gradients and the rate agree."""
    name, step = failure.subject, failure.step
    oracle, independent = runs.oracle[step], runs.independent[step]
    settings, right = runs.plan.mathematics.optimizer, independent.after[name]
    fact = weights_of(runs.plan.model)[name]
    part = oracle.updates[name]
    if settings.kind != "sgd" and decays(settings, fact):
        wanted = -independent.learning_rate * settings.weight_decay * independent.before[name]
        if float((part.decay - wanted).norm()) > SAME * float(wanted.norm()):
            factor, _ = fit_factor(part.decay, wanted)
            return WEIGHT_DECAY, name, f"it decays {factor:.6g} times as fast as it should"
    factor, residual = fit_factor(part.total, right - independent.before[name])
    times = f"{factor:.6g} times the right one" if residual < EXPLAINED else ""
    return UPDATE, name, times or f"off by {failure.error:.2g}; gradients and rate agree"
