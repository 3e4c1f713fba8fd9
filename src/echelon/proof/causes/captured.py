# SPDX-License-Identifier: Apache-2.0
"""What the first failure of a captured program is: by the rule that it breaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from echelon.core.rulebook import prove as rules
from echelon.core.rulebook import verify as verify_rules
from echelon.proof.causes.factors import name_partial_norm, named_on_mesh, place_of_parameter
from echelon.proof.causes.finding import Diagnosis, ProofFinding, with_distinguishing_axis
from echelon.proof.causes.gradients.captured import explain_gradient
from echelon.proof.causes.passing.lost_weights import explain_lost_weight
from echelon.proof.causes.passing.modules import explain_passing
from echelon.proof.causes.passing.token_losses import explain_token_losses
from echelon.proof.causes.updates.captured import explain_state, explain_update
from echelon.proof.claims.checks import Check
from echelon.proof.claims.claims import ClaimResult
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.fits import fit_factor, furthest_value, relative_residual
from echelon.proof.evidence.groups import group_of
from echelon.proof.evidence.run import INITIAL, PARAMETERS

_COARSE = 1e-2  # relative error
_LESS_THAN_LABELS = ("parts missing", "parts weighted", "wrong norm")
"""What a gradient has of a wrong loss whose labels tell more."""


def first_cause_of_program(
    evidence: CapturedEvidence, results: Sequence[ClaimResult], result: ClaimResult, failure: Check
) -> Diagnosis:
    """Return what the first failure of a captured program is, or what is behind it."""
    finding = _EXPLANATIONS.get(result.rule.id, _as_told)(evidence, failure)
    if finding.factor == "none" and result.rule.id == rules.PROVE_LOSS.id:
        result, failure, finding = _by_gradient(evidence, results, (result, failure, finding))
    finding = _by_what_passed(evidence, result, failure, finding) or finding
    rough = evidence.tolerance.own_precision and failure.allowed < failure.error
    if finding.factor == "none" and rough and failure.error < max(_COARSE, 4 * failure.allowed):
        says = f"off by {failure.error:.1g}, allowed {failure.allowed:.1g}: another order of sums, "
        says += "or a dtype coarser than the run's"
        finding = replace(finding, factor="reordering only", description=says)
    where = place_of_parameter(evidence, finding.tensor or failure.subject)
    return Diagnosis.of(result, failure, finding, where)


def _by_what_passed(
    evidence: CapturedEvidence, result: ClaimResult, failure: Check, finding: ProofFinding
) -> ProofFinding | None:
    """Return what the labels of the loss, modules and weights tell of what has no cause yet."""
    rule, step = result.rule.id, failure.step
    if finding.factor == "zero" and rule == rules.PROVE_GRADIENTS.id:
        lost = explain_lost_weight(evidence, step, failure.subject)
        return None if lost is None else replace(lost, ranks=finding.ranks)
    if finding.factor != "none":
        return None
    if rule == rules.PROVE_LOSS.id:
        of_labels = explain_token_losses(evidence, failure)
        return of_labels or explain_passing(evidence, step, backward=False)
    if rule in (verify_rules.VERIFY_LOCAL_GRADIENTS.id, rules.PROVE_GRADIENTS.id):
        return explain_passing(evidence, step, backward=True)
    return None


def _by_gradient(
    evidence: CapturedEvidence,
    results: Sequence[ClaimResult],
    told: tuple[ClaimResult, Check, ProofFinding],
) -> tuple[ClaimResult, Check, ProofFinding]:
    """Return what explains a wrong loss: a wrong gradient of the step, where that has a name."""
    for result in results:
        if result.rule.id in (verify_rules.VERIFY_LOCAL_GRADIENTS.id, rules.PROVE_GRADIENTS.id):
            of_step = [one for one in result.failures if one.step == told[1].step]
            finding = explain_gradient(evidence, of_step[0]) if of_step else told[2]
            if finding.factor in _LESS_THAN_LABELS:
                of_labels = explain_token_losses(evidence, told[1])
                if of_labels is not None:
                    return told[0], told[1], of_labels
            if finding.factor != "none":
                says = f"{finding.description}; the loss is wrong too: {told[1].detail}"
                return result, of_step[0], replace(finding, description=says)
    return told


def _as_told(_: CapturedEvidence, failure: Check) -> ProofFinding:
    return ProofFinding("none", failure.detail or "not as on one device")


def _dropped(evidence: CapturedEvidence, failure: Check) -> ProofFinding:
    holders = evidence.run.holders(PARAMETERS, INITIAL, failure.subject)
    twice = "twice" in failure.detail
    finding = ProofFinding("doubled" if twice else "missing", failure.detail)
    return replace(finding, ranks=tuple(holders))


def _initial(evidence: CapturedEvidence, failure: Check) -> ProofFinding:
    name = failure.subject
    right = evidence.initial[name].double().reshape(-1)
    held = {
        rank: evidence.run.vector(PARAMETERS, INITIAL, name, rank)
        for rank in evidence.run.holders(PARAMETERS, INITIAL, name)
    }
    wrong = [
        r for r, one in held.items() if not torch.equal(one[~one.isnan()], right[~one.isnan()])
    ]
    if not wrong:
        return ProofFinding("missing", "no rank holds it")
    mine = held[wrong[0]][~held[wrong[0]].isnan()]
    finding = None
    for rank, one in held.items():
        theirs = right[~one.isnan()]
        if rank != wrong[0] and theirs.shape == mine.shape and torch.equal(theirs, mine):
            says = f"rank {wrong[0]} holds what rank {rank} must: slices are permuted"
            finding = ProofFinding("shards permuted", says)
    own = right[~held[wrong[0]].isnan()]
    factor, residual = fit_factor(mine, own)
    if finding is None and residual < evidence.explained:
        finding = named_on_mesh(evidence, evidence.steps[0], factor, residual)
    if finding is None and relative_residual(mine.sort().values, own.sort().values) < 1e-6:
        finding = ProofFinding("permuted", "holds the right values in another order")
    says = "other random numbers than one device has: build and seed it alike on every rank, or "
    says += "set OnRank.copy_initial"
    finding = finding or ProofFinding("none", says)
    finding = replace(finding, ranks=tuple(wrong))
    return with_distinguishing_axis(evidence.axes(), finding, wrong, held)


def _loss(evidence: CapturedEvidence, failure: Check) -> ProofFinding:
    step = evidence.steps[failure.step]
    told = [one.loss for one in evidence.run.reports(failure.step) if one.loss is not None]
    value = evidence.run.loss(failure.step) or 0.0
    if step.parts:
        means = [float(total) / tokens for tokens, total in step.part_losses]
        mean = sum(means) / len(means)
        if abs(value - mean) <= evidence.explained * abs(mean):
            return ProofFinding(
                "mean of means", f"{failure.detail}: the mean of the means of parts"
            )
    finding = named_on_mesh(evidence, step, value / step.loss)
    if finding.factor != "number":
        return replace(finding, description=f"{failure.detail}: {finding.description}")
    spread = f"; ranks tell {min(told):.6g} to {max(told):.6g}" if len(set(told)) > 1 else ""
    says = f"{failure.detail}{spread}: another forward pass, other rows, or another mean of them"
    return ProofFinding("none", says)


def _norm(evidence: CapturedEvidence, failure: Check) -> ProofFinding:
    step = evidence.steps[failure.step]
    values = [one.grad_norm for one in evidence.run.reports(failure.step)]
    wrong = furthest_value([v for v in values if v is not None], step.grad_norm)
    return name_partial_norm(evidence, step, wrong) or named_on_mesh(
        evidence, step, wrong / step.grad_norm
    )


def _replicas(evidence: CapturedEvidence, failure: Check) -> ProofFinding:
    held = {
        rank: evidence.run.vector(PARAMETERS, failure.step, failure.subject, rank)
        for rank in evidence.run.holders(PARAMETERS, failure.step, failure.subject)
    }
    whole = evidence.run.whole(PARAMETERS, failure.step, failure.subject).reshape(-1)
    odd = [r for r, one in held.items() if not torch.equal(one[~one.isnan()], whole[~one.isnan()])]
    finding = ProofFinding("copies differ", failure.detail)
    finding = replace(finding, ranks=tuple(odd))
    return with_distinguishing_axis(evidence.axes(), finding, odd, held)


def not_sharded(evidence: CapturedEvidence, failure: Check) -> ProofFinding:
    """Return the finding of a tensor that is whole where shards were asked for, with its axis."""
    held = evidence.run.held_copies().get(failure.subject)
    ranks = held.ranks if held is not None else tuple(range(evidence.mesh.world_size))
    spanning = (axis for axis, groups in evidence.sums("") if group_of(groups, ranks[0]) == ranks)
    value = float(len(ranks))
    axis = next(spanning, "")
    return ProofFinding("not sharded", failure.detail, axis, value=value, ranks=ranks)


_EXPLANATIONS: Mapping[str, Callable[[CapturedEvidence, Check], ProofFinding]] = {
    rules.PROVE_NOTHING_DROPPED.id: _dropped,
    rules.PROVE_INITIAL_WEIGHTS.id: _initial,
    rules.PROVE_LOSS.id: _loss,
    verify_rules.VERIFY_LOCAL_GRADIENTS.id: explain_gradient,
    rules.PROVE_GRADIENTS.id: explain_gradient,
    rules.PROVE_GRADIENT_NORM.id: _norm,
    verify_rules.VERIFY_OPTIMIZER_STATE.id: explain_state,
    rules.PROVE_CLIPPED_UPDATE.id: explain_update,
    rules.PROVE_PARAMETERS.id: explain_update,
    rules.PROVE_REPLICAS.id: _replicas,
    verify_rules.VERIFY_SHARDING.id: not_sharded,
}
"""What explains a failure, by the rule that it breaks."""
