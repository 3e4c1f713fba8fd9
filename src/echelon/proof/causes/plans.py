# SPDX-License-Identifier: Apache-2.0
"""What the first failure of a plan is: by the rule that it breaks; its races."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from echelon.core.parameters import ParameterSpec, parameters
from echelon.core.plan import Plan
from echelon.core.rulebook import prove as rules
from echelon.core.rules import Rule
from echelon.layout.stage import pieces_of
from echelon.parallel.completion.in_flight import Race, RaceKind
from echelon.proof.causes.activations import (
    describe_boundary,
    explain_activation,
    explain_backward,
    tensor_at,
)
from echelon.proof.causes.factors import known_factors, name_factor, named_factor
from echelon.proof.causes.finding import Diagnosis, ProofFinding
from echelon.proof.causes.forward.losses import (
    explain_loss,
    explain_microbatch_losses,
    explain_scale,
)
from echelon.proof.causes.forward.variants import vocabulary_variants
from echelon.proof.causes.gradients.gradients import explain_gradient
from echelon.proof.causes.gradients.norm import explain_norm, stage_of
from echelon.proof.causes.routing import (
    explain_loads,
    explain_router_losses,
    explain_router_state,
    explain_routes,
    router_of,
)
from echelon.proof.causes.updates.outer_steps import explain_outer
from echelon.proof.causes.updates.updates import (
    explain_replayed,
    explain_update,
    explain_written_back,
)
from echelon.proof.claims.checks import Check
from echelon.proof.claims.claims import ClaimResult, first_failure
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.claims.systematic import PADDING, fits
from echelon.proof.evidence.fits import EXPLAINED, fit_factor
from echelon.proof.evidence.groups import named_groups
from echelon.proof.evidence.run import INITIAL
from echelon.proof.late import LateRun
from echelon.proof.oracle.oracle import initial_parameters
from echelon.proof.ranks import ObservedShard

_PREDICTION_AXES = {
    rules.PROVE_BYTES_SENT.id: "",
    rules.PROVE_SCHEDULE_ORDER.id: "pp",
    rules.PROVE_ISLANDS_AGREE.id: "dp_replicate",
    rules.PROVE_BYTES_HELD.id: "",
}
"""What a plan promises beside its mathematics, each with the axis that a breach points to."""

_EXACT_RULES = frozenset(
    {
        rules.PROVE_MASTER_WEIGHTS.id,
        rules.PROVE_LOSS_SCALE.id,
        rules.PROVE_SYSTEMATIC_ERROR.id,
        rules.PROVE_SUM_DTYPE.id,
        rules.PROVE_RANGE.id,
    }
)
"""Claims that know no rounding, or tell it apart, in the plan's own precision too."""

_VAGUE = ("none", "slice")
"""What is told of a gradient that nothing explains."""

_FINE = 1e-6  # relative error
_COARSE = 1e-2  # relative error


def first_cause_of_plan(
    evidence: PlanEvidence, results: Sequence[ClaimResult], result: ClaimResult, failure: Check
) -> Diagnosis:
    """Return what the first failure of a plan is, or what is behind it."""
    result, failure = _before_its_router(evidence, results, result, failure)
    result, failure = _as_a_factor(results, result, failure)
    finding = _explain(evidence, result.rule.id, failure)
    return Diagnosis.of(result, failure, finding, _where(evidence.plan, finding.tensor))


def _before_its_router(
    evidence: PlanEvidence, results: Sequence[ClaimResult], result: ClaimResult, failure: Check
) -> tuple[ClaimResult, Check]:
    """Return, in place of a wrong route, what is wrong before its router."""
    if result.rule.id not in _OF_ROUTES:
        return result, failure
    router = router_of(evidence, failure).rpartition(".mlp")[0]
    names = list(evidence.steps[failure.step].activations)
    last = names.index(f"{router}.scores") if f"{router}.scores" in names else 0
    for other in results:
        for earlier in other.failures if other.rule.id == rules.PROVE_ACTIVATIONS.id else ():
            if earlier.step == failure.step and earlier.position < last:
                return other, earlier
    return result, failure


def _as_a_factor(
    results: Sequence[ClaimResult], result: ClaimResult, failure: Check
) -> tuple[ClaimResult, Check]:
    """Return, in place of an activation that is off, that it is so by a factor, where it is."""
    if result.rule.id != rules.PROVE_ACTIVATIONS.id:
        return result, failure
    for other in results:
        for same in other.failures if other.rule.id == rules.PROVE_SYSTEMATIC_ERROR.id else ():
            if (same.step, same.subject) == (failure.step, failure.subject):
                return other, same
    return result, failure


def _explain(evidence: PlanEvidence, rule: str, failure: Check) -> ProofFinding:
    """Return what a failure of `rule` is, under the name that it is told under."""
    subject = failure.subject
    if rule in _PREDICTION_AXES:
        over = subject.rpartition(" over ")[2] if " over " in subject else ""
        axis = over or _PREDICTION_AXES[rule]
        return ProofFinding("not as planned", failure.detail, axis, tensor=subject)
    rough = evidence.tolerance.own_precision and rule not in _EXACT_RULES
    if rough and failure.allowed < failure.error < max(_COARSE, 4 * failure.allowed):
        # A wrong factor would be as wrong in float64, which is judged first.
        why = "another order of sums, or a dtype coarser than the plan's"
        return replace(_rounding(failure, why), tensor=subject)
    if explain := _EXPLANATIONS.get(rule):
        finding = explain(evidence, failure)
    else:
        finding = ProofFinding("none", failure.detail or "not as on one device")
    name = router_of(evidence, failure) if rule in _OF_ROUTERS else _NUMBERS.get(rule, subject)
    tensor = finding.tensor or name
    if finding.factor == "none" and 0 < failure.error < _FINE:
        told = _rounding(failure, "another order of sums, or a part in a lower precision")
        finding = replace(told, ranks=finding.ranks)
    return replace(finding, tensor=tensor)


def _rounding(failure: Check, why: str) -> ProofFinding:
    says = f"off by rounding only ({failure.error:.1g}, allowed {failure.allowed:.1g}): {why}"
    return ProofFinding("reordering only", says, residual=failure.error)


def _initial(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """Tell a shard that holds another part of the right values from wrong values."""
    name, observed = failure.subject, evidence.run
    right = initial_parameters(evidence.plan)[name]
    pieces = observed.parts("masters" if failure.detail else "parameters", INITIAL, name)
    wrong = [p for p in pieces if observed.fits(p) and not _holds(p, right[p.region])]
    if not wrong:
        return ProofFinding("missing", "no rank holds it")
    finding = _moved_from(evidence, wrong[0], right)
    factor, residual = fit_factor(wrong[0].tensor, right[wrong[0].region])
    if finding is None and residual < EXPLAINED:
        finding = named_factor(evidence.plan, evidence.steps[0], factor, residual)
    if finding is None and (other := _expert_of(evidence, wrong[0])):
        says = f"holds the first weights of {other}: experts are numbered otherwise"
        finding = ProofFinding("experts permuted", says, "ep")
    finding = finding or ProofFinding("none", "other random numbers than one device has")
    return replace(finding, ranks=tuple(piece.rank for piece in wrong))


def _holds(piece: ObservedShard, right: torch.Tensor) -> bool:
    return torch.equal(piece.tensor, right.to(piece.tensor.dtype))


def _expert_of(evidence: PlanEvidence, piece: ObservedShard) -> str | None:
    """Find another expert whose first weights a piece holds."""
    spec = evidence.run.specs[piece.name]
    if spec.expert is None:
        return None
    prefix, _, suffix = piece.name.partition(f".{spec.expert}.")
    for name, values in initial_parameters(evidence.plan).items():
        namesake = name.startswith(f"{prefix}.") and name.endswith(f".{suffix}")
        if namesake and _holds(piece, values[piece.region]):
            return name.removesuffix(f".{suffix}")
    return None


def _moved_from(
    evidence: PlanEvidence, piece: ObservedShard, right: torch.Tensor
) -> ProofFinding | None:
    """Find where along the tensor-parallel dim the values of a piece stand in the right tensor."""
    spec = evidence.run.specs[piece.name]
    dim = spec.split_dim
    if dim is None or pieces_of(evidence.plan, spec) == 1:
        return None
    region = list(piece.region)
    size = piece.tensor.shape[dim]
    for start in range(spec.shape[dim] - size + 1):
        region[dim] = slice(start, start + size)
        if _holds(piece, right[tuple(region)]):
            says = f"holds dim {dim} from {start} on instead of from {piece.offset[dim]}"
            return ProofFinding("shards permuted", f"{says}: a wrong slice", "tp")
    return None


def _dropped(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    detail = failure.detail
    if failure.subject.startswith("samples"):
        factor = "same data" if "read the samples of dp" in detail else "samples"
        return ProofFinding(factor, detail, "dp")
    if "block" in detail:
        return ProofFinding("zero" if detail.startswith("none") else "extra", detail, "pp")
    factor = "doubled" if "more than one" in detail else "one shard missing"
    spec = evidence.run.specs.get(failure.subject)
    of_expert = spec is not None and spec.expert is not None
    axis = next(named_groups(evidence.plan, expert=True))[0] if of_expert else ""
    return ProofFinding(factor, detail, axis)


def _tokens(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    oracle = evidence.steps[failure.step]
    said = [report.tokens for report in evidence.run.reports(failure.step)]
    wrong = next(count for count in said if count != oracle.tokens)
    named = named_factor(evidence.plan, oracle, wrong / oracle.tokens)
    says = f"{wrong} valid tokens instead of {oracle.tokens}: {named.description}"
    return replace(named, description=says)


def _gradient(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """Return what is wrong with a gradient and, if nothing explains it, where backward goes so."""
    finding = explain_gradient(evidence, failure)
    backward = explain_backward(evidence, failure.step) if finding.factor in _VAGUE else None
    return finding if backward is None else replace(backward, ranks=finding.ranks)


def _backward(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """Return where a backward pass goes wrong that leaves all gradients of parameters right."""
    finding = explain_backward(evidence, failure.step)
    return finding or ProofFinding("none", failure.detail, tensor=tensor_at(failure.subject))


_NUMBERS = {
    rules.PROVE_TOKEN_COUNT.id: "token count",
    rules.PROVE_LOSS.id: "loss",
    rules.PROVE_GRADIENT_NORM.id: "gradient norm",
    rules.PROVE_LOSS_SCALE.id: "loss scale",
}
"""What a wrong number is told under, on whatever rank."""

_OF_ROUTES = frozenset(
    {rules.PROVE_ROUTES.id, rules.PROVE_EXPERT_LOADS.id, rules.PROVE_ROUTER_LOSSES.id}
)
"""What follows from a forward pass that is wrong before a router."""

_OF_ROUTERS = frozenset(
    {rules.PROVE_EXPERT_LOADS.id, rules.PROVE_ROUTER_LOSSES.id, rules.PROVE_ROUTER_BIASES.id}
)
"""What is told under the name of a router."""


def _where(plan: Plan, tensor: str) -> str:
    """Return where a tensor (or a whole block) is in the model and on the mesh."""
    specs = {spec.name: spec for spec in parameters(plan.model)}
    if tensor not in specs:
        inside = [spec for name, spec in specs.items() if name.startswith(tensor + ".")]
        return _place(plan, inside[0]) if inside else ""
    spec = specs[tensor]
    place = _place(plan, spec)
    if spec.expert is not None and plan.mesh.ep > 1:
        place = f"{place}, on ep {_share_of(plan, spec.expert)}"
    if plan.mesh.tp == 1 or (spec.expert is not None and pieces_of(plan, spec) == 1):
        return place
    split = (
        "replicated over tp" if spec.split_dim is None else f"dim {spec.split_dim} split over tp"
    )
    return f"{place}, {split}"


def _share_of(plan: Plan, expert: int) -> int:
    """Return which of the shares an expert is in."""
    assert plan.model.experts is not None, "the model has experts"
    return expert * plan.mesh.ep // plan.model.experts.num_experts


def _place(plan: Plan, spec: ParameterSpec) -> str:
    if spec.layer is not None:
        place = f"block {spec.layer} of {plan.model.layers}"
    else:
        before = spec.name.startswith(("embedding", "positions"))
        place = "before the first block" if before else "after the last block"
    return f"{place}, stage {stage_of(plan, spec)}" if plan.num_stages > 1 else place


_STANDARD_ERRORS = 3.0
"""Within which a known factor is the one that was fitted."""


def explain_systematic(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """Return the factor by which a tensor is off beside its rounding."""
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
    """Return that a float32 sum was rounded on its way."""
    says = f"{failure.detail}: the sum was rounded before it is float32"
    return ProofFinding("rounded sum", says)


def explain_range(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """Return what overflows, or vanishes, where one device in this precision has numbers."""
    vanished = failure.detail.endswith("zero")
    dtype = evidence.plan.mathematics.precision.parameters
    says = f"{failure.detail}, where one device in {dtype} has numbers"
    return ProofFinding("vanished" if vanished else "not finite", says)


RACE_RULES: dict[RaceKind, Rule] = {
    RaceKind.NEVER_AWAITED: rules.PROVE_AWAITED,
    RaceKind.USED: rules.PROVE_AWAITED,
    RaceKind.CHANGED: rules.PROVE_IN_FLIGHT,
    RaceKind.FREED: rules.PROVE_FREED,
    RaceKind.USED_FREED: rules.PROVE_FREED,
    RaceKind.FREED_TWICE: rules.PROVE_FREED,
}
"""The rule that each kind of race breaks."""


def diagnose_races(late: LateRun | None, results: Sequence[ClaimResult]) -> Diagnosis | None:
    """Return what the first race is, and what is wrong by it; None where there is none.

    The first one is the cause of those that follow: what is read too early is sent on.
    """
    if late is None or not late.races:
        return None
    first = min(late.races, key=lambda race: race.when_s)
    alike = [race for race in late.races if _same_operation(race, first)]
    broken = {rule.id for rule in RACE_RULES.values()}
    wrong = first_failure([result for result in results if result.rule.id not in broken])
    says = f"{first.kind}: {first.says}"
    if wrong is not None:
        result, failure = wrong
        says += f"; the first wrong value is {failure.subject} in step {failure.step}"
        says += f" ({result.statement})"
    return Diagnosis(
        rule=RACE_RULES[first.kind].id,
        step=first.step,
        tensor=first.operation,
        where=f"at {first.at}" if first.at else "",
        factor=str(first.kind),
        axis=first.axis,
        value=None,
        says=says,
        residual=0.0,
        ranks=tuple(sorted({race.rank for race in alike})),
        num_wrong=len({race.operation for race in late.races}),
        num_compared=sum(late.num_operations),
    )


def _same_operation(one: Race, other: Race) -> bool:
    return (one.kind, one.operation) == (other.kind, other.operation)


_EXPLANATIONS: Mapping[str, Callable[[PlanEvidence, Check], ProofFinding]] = {
    rules.PROVE_ACTIVATIONS.id: explain_activation,
    rules.PROVE_SYSTEMATIC_ERROR.id: explain_systematic,
    rules.PROVE_SUM_DTYPE.id: explain_sum_dtype,
    rules.PROVE_RANGE.id: explain_range,
    rules.PROVE_ACTIVATION_GRADIENTS.id: _backward,
    rules.PROVE_GRADIENTS.id: _gradient,
    rules.PROVE_OUTER_STEP.id: explain_outer,
    rules.PROVE_CLIPPED_UPDATE.id: explain_update,
    rules.PROVE_REPLAYED_UPDATE.id: explain_replayed,
    rules.PROVE_MASTER_WEIGHTS.id: explain_written_back,
    rules.PROVE_ROUTES.id: explain_routes,
    rules.PROVE_EXPERT_LOADS.id: explain_loads,
    rules.PROVE_ROUTER_LOSSES.id: explain_router_losses,
    rules.PROVE_ROUTER_BIASES.id: explain_router_state,
    rules.PROVE_INITIAL_WEIGHTS.id: _initial,
    rules.PROVE_NOTHING_DROPPED.id: _dropped,
    rules.PROVE_TOKEN_COUNT.id: _tokens,
    rules.PROVE_MICROBATCH_LOSS.id: explain_microbatch_losses,
    rules.PROVE_LOSS.id: explain_loss,
    rules.PROVE_GRADIENT_NORM.id: explain_norm,
    rules.PROVE_LOSS_SCALE.id: explain_scale,
}
