# SPDX-License-Identifier: Apache-2.0
"""From the first thing that is wrong to a name for it: tensor, place, factor, axis.

Our engine and a program that is not ours are judged alike, by the rule that the first failure
breaks. What a plan promises, or hooks saw pass between modules, tells more where there is such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from echelon.core.parameters import ParameterSpec, parameters
from echelon.core.plan import Plan
from echelon.core.rulebook import prove as rules
from echelon.core.rulebook import verify as verify_rules
from echelon.core.rules import Rule
from echelon.layout.stage import pieces_of
from echelon.parallel.completion.in_flight import RaceKind
from echelon.proof.causes.activations import explain_activation, explain_backward, tensor_at
from echelon.proof.causes.factors import named_factor
from echelon.proof.causes.finding import (
    VAGUE,
    Diagnosis,
    ProofFinding,
    with_distinguishing_axis,
)
from echelon.proof.causes.first_weights import explain_first_weights
from echelon.proof.causes.forward.losses import (
    explain_loss,
    explain_microbatch_losses,
    explain_scale,
)
from echelon.proof.causes.gradients.gradients import explain_gradient
from echelon.proof.causes.gradients.norm import explain_norm, stage_of
from echelon.proof.causes.passing.attention import explain_attention
from echelon.proof.causes.passing.modules import explain_lost_weight, explain_passing
from echelon.proof.causes.passing.token_losses import explain_token_losses
from echelon.proof.causes.rounding import explain_range, explain_sum_dtype, explain_systematic
from echelon.proof.causes.routing import (
    explain_loads,
    explain_router_losses,
    explain_router_state,
    explain_routes,
    router_of,
)
from echelon.proof.causes.updates.optimizer_constants import explain_optimizer_state
from echelon.proof.causes.updates.outer_steps import explain_outer
from echelon.proof.causes.updates.updates import (
    explain_replayed,
    explain_update,
    explain_written_back,
)
from echelon.proof.claims.checks import Check
from echelon.proof.claims.claims import ClaimResult, first_failure
from echelon.proof.claims.plan_evidence import JudgedEvidence, PlanEvidence
from echelon.proof.evidence.captured import LateCapture
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.mesh import group_of, named_groups
from echelon.proof.evidence.run import GRADIENTS, INITIAL, PARAMETERS
from echelon.proof.late import LateRun

_GRADIENTS = (verify_rules.VERIFY_LOCAL_GRADIENTS.id, rules.PROVE_GRADIENTS.id)

_PREDICTION_AXES = {
    rules.PROVE_BYTES_SENT.id: "",
    rules.PROVE_SCHEDULE_ORDER.id: "pp",
    rules.PROVE_ISLANDS_AGREE.id: "dp_replicate",
    rules.PROVE_BYTES_HELD.id: "",
}
"""Promises of a plan next to its mathematics, each with the axis that a breach points to."""

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

_VAGUE_UPDATES = (*VAGUE, "other size", "zero")
"""Factors of an update that do not need the right gradient."""

_LESS_THAN_LABELS = ("parts missing", "parts weighted", "wrong norm")
"""Factors of a gradient that say less of a wrong loss than its labels do."""

_NEAR = 0.01  # error of an update relative to that of a gradient from which it cannot come
_FINE = 1e-6  # relative error
_COARSE = 1e-2  # relative error


def diagnose(evidence: JudgedEvidence, results: Sequence[ClaimResult]) -> Diagnosis | None:
    """The cause of the first failure; None if all claims hold."""
    first = first_failure(results)
    if first is None:
        return None
    if isinstance(evidence, PlanEvidence):
        result, failure = _as_a_factor(results, *_before_its_router(evidence, results, *first))
        finding = _explain(evidence, result.rule.id, failure)
        finding = _with_gradients(evidence, results, failure, finding)
        return Diagnosis.of(result, failure, finding, _where(evidence.plan, finding.tensor))
    result, failure = first
    finding = _explain(evidence, result.rule.id, failure)
    if finding.factor == "none" and result.rule.id == rules.PROVE_LOSS.id:
        result, failure, finding = _by_gradient(evidence, results, (result, failure, finding))
    finding = _with_gradients(evidence, results, failure, finding)
    result, failure, finding = _by_update(evidence, results, (result, failure, finding))
    finding = _by_what_passed(evidence, result, failure, finding) or finding
    finding = _or_rounding(failure, finding, rough=evidence.tolerance.own_precision)
    where = evidence.run.place_of(finding.tensor or failure.subject)
    return Diagnosis.of(result, failure, finding, where)


def _before_its_router(
    evidence: PlanEvidence, results: Sequence[ClaimResult], result: ClaimResult, failure: Check
) -> tuple[ClaimResult, Check]:
    """The first wrong activation before a router, if there is one, in place of its wrong route."""
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
    """The systematic error of a wrong activation, if it has one, in place of the activation."""
    if result.rule.id != rules.PROVE_ACTIVATIONS.id:
        return result, failure
    for other in results:
        for same in other.failures if other.rule.id == rules.PROVE_SYSTEMATIC_ERROR.id else ():
            if (same.step, same.subject) == (failure.step, failure.subject):
                return other, same
    return result, failure


def _explain(evidence: JudgedEvidence, rule: str, failure: Check) -> ProofFinding:
    """Name a failure of `rule`, and the wrong tensor or number."""
    subject = failure.subject
    if rule in _PREDICTION_AXES:
        over = subject.rpartition(" over ")[2].partition(" ")[0] if " over " in subject else ""
        axis = over or _PREDICTION_AXES[rule]
        return ProofFinding("not as planned", failure.detail, axis, tensor=subject)
    rough = evidence.tolerance.own_precision and rule not in _EXACT_RULES
    of_plan = isinstance(evidence, PlanEvidence)
    if of_plan and rough and failure.allowed < failure.error < max(_COARSE, 4 * failure.allowed):
        # A wrong factor would be as wrong in float64, which is judged first.
        return replace(_rounding(failure, _COARSER), tensor=subject)
    finding = _EXPLANATIONS.get(rule, _as_told)(evidence, failure)
    name = _NUMBERS.get(rule, subject)
    if isinstance(evidence, PlanEvidence):
        name = router_of(evidence, failure) if rule in _OF_ROUTERS else name
        finding = _or_rounding(failure, finding)
    return replace(finding, tensor=finding.tensor or name)


def _as_told(_: JudgedEvidence, failure: Check) -> ProofFinding:
    return ProofFinding("none", failure.detail or "not as on one device")


def _values(evidence: JudgedEvidence, failure: Check) -> ProofFinding:
    """Explain a value after the last step: of a plan, each of its updates was right."""
    explain = _as_told if isinstance(evidence, PlanEvidence) else explain_update
    return explain(evidence, failure)


_COARSER = "another order of sums, or a dtype coarser than the run's"


def _rounding(failure: Check, why: str) -> ProofFinding:
    says = f"off by rounding only ({failure.error:.1g}, allowed {failure.allowed:.1g}): {why}"
    return ProofFinding("reordering only", says, residual=failure.error)


def _or_rounding(failure: Check, finding: ProofFinding, *, rough: bool = False) -> ProofFinding:
    """Name rounding as the cause of a small error without another cause."""
    if finding.factor not in VAGUE or not failure.error > 0:
        return finding
    if rough and failure.allowed < failure.error < max(_COARSE, 4 * failure.allowed):
        return replace(_rounding(failure, _COARSER), ranks=finding.ranks, tensor=finding.tensor)
    if finding.factor == "none" and failure.error < _FINE:
        why = "another order of sums, or a part in a lower precision"
        return replace(_rounding(failure, why), ranks=finding.ranks, tensor=finding.tensor)
    return finding


def _by_what_passed(
    evidence: CapturedEvidence, result: ClaimResult, failure: Check, finding: ProofFinding
) -> ProofFinding | None:
    """The cause that labels of the loss, modules or weights show, of a failure without one."""
    rule, step = result.rule.id, failure.step
    if finding.factor == "zero" and rule == rules.PROVE_GRADIENTS.id:
        lost = explain_lost_weight(evidence, step, failure.subject)
        return None if lost is None else replace(lost, ranks=finding.ranks)
    if finding.factor not in VAGUE:
        return None
    if rule == rules.PROVE_LOSS.id:
        of_labels = explain_token_losses(evidence, failure)
        return of_labels or _by_forward(evidence, step)
    if rule in _GRADIENTS:
        forward = _by_forward(evidence, step)
        if forward is not None and forward.factor not in VAGUE:
            return forward
        place = explain_passing(evidence, step, backward=True) or forward
        if place is None or place.factor not in VAGUE:
            return place
        return replace(place, description=f"{place.description}; {finding.description}")
    return None


def _by_forward(evidence: CapturedEvidence, step: int) -> ProofFinding | None:
    """The cause of a wrong forward pass: how attention is called, or the first wrong module."""
    finding = explain_passing(evidence, step, backward=False)
    if finding is not None and finding.factor not in VAGUE:
        return finding
    return explain_attention(evidence, step) or finding


def _by_gradient(
    evidence: CapturedEvidence,
    results: Sequence[ClaimResult],
    told: tuple[ClaimResult, Check, ProofFinding],
) -> tuple[ClaimResult, Check, ProofFinding]:
    """Explain a wrong loss by a wrong gradient of the same step, if that has a cause."""
    for result in results:
        if result.rule.id in _GRADIENTS:
            of_step = [one for one in result.failures if one.step == told[1].step]
            finding = explain_gradient(evidence, of_step[0]) if of_step else told[2]
            if finding.factor in _LESS_THAN_LABELS:
                of_labels = explain_token_losses(evidence, told[1])
                if of_labels is not None:
                    return told[0], told[1], of_labels
            if finding.factor not in VAGUE:
                says = f"{finding.description}; the loss is wrong too: {told[1].detail}"
                return result, of_step[0], replace(finding, description=says)
    return told


def _with_gradients(
    evidence: JudgedEvidence, results: Sequence[ClaimResult], failure: Check, finding: ProofFinding
) -> ProofFinding:
    """Say of a wrong loss that has a cause how the gradients of its step fare."""
    if finding.tensor != _NUMBERS[rules.PROVE_LOSS.id] or finding.factor in VAGUE:
        return finding
    wrong = [
        check
        for result in results
        for check in result.failures
        if result.rule.id in _GRADIENTS and check.step == failure.step
    ]
    if not wrong:
        says = "gradients are right: the reported loss is wrong, not the loss of backward"
    else:
        first = explain_gradient(evidence, wrong[0])
        says = f"gradients are wrong too ({wrong[0].subject}: {first.description})"
    return replace(finding, description=f"{finding.description}; {says}")


def _by_update(
    evidence: CapturedEvidence,
    results: Sequence[ClaimResult],
    told: tuple[ClaimResult, Check, ProofFinding],
) -> tuple[ClaimResult, Check, ProofFinding]:
    """Explain a gradient that is reduced in its update by a wrong update of the right gradient.

    A missing sum predicts other copies after the step, or an update of a rank's own gradient. Where
    copies agree, an update that the right gradient explains, or nearly makes, shows the sum.
    """
    step, name = told[1].step, told[1].subject
    alike = {
        kind: all(
            bool((one == copies[0])[~one.isnan()].all())
            for copies in [list(evidence.run.vectors(kind, step, name).values())]
            for one in copies
        )
        for kind in (GRADIENTS, PARAMETERS)
    }
    if told[0].rule.id != rules.PROVE_GRADIENTS.id or alike[GRADIENTS] or not alike[PARAMETERS]:
        return told
    failures = {
        result.rule.id: (result, one)
        for result in results
        for one in reversed(result.failures)
        if one.step == step and (one.subject == name or result.rule.id in _NUMBERS)
    }
    if (update := failures.get(rules.PROVE_CLIPPED_UPDATE.id)) is None:
        return told
    finding = replace(explain_update(evidence, update[1]), tensor=name)
    if finding.factor not in _VAGUE_UPDATES and finding.residual < evidence.explained:
        return *update, finding
    if update[1].error > _NEAR * told[1].error:
        return told
    if (norm := failures.get(rules.PROVE_GRADIENT_NORM.id)) is not None:
        return *norm, replace(explain_norm(evidence, norm[1]), tensor="gradient norm")
    return *update, finding


def _dropped(evidence: JudgedEvidence, failure: Check) -> ProofFinding:
    detail = failure.detail
    if isinstance(evidence, CapturedEvidence):
        holders = tuple(evidence.run.holders(PARAMETERS, INITIAL, failure.subject))
        return ProofFinding("doubled" if "twice" in detail else "missing", detail, ranks=holders)
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
    named = named_factor(evidence, oracle, wrong / oracle.tokens)
    says = f"{wrong} valid tokens instead of {oracle.tokens}: {named.description}"
    return replace(named, description=says)


def _gradient(evidence: JudgedEvidence, failure: Check) -> ProofFinding:
    """Explain a gradient; without an explanation, name the wrong place of the backward pass."""
    finding = explain_gradient(evidence, failure)
    if not isinstance(evidence, PlanEvidence) or finding.factor not in VAGUE:
        return finding
    backward = explain_backward(evidence, failure.step)
    return finding if backward is None else replace(backward, ranks=finding.ranks)


def _backward(evidence: PlanEvidence, failure: Check) -> ProofFinding:
    """The place where a backward pass goes wrong though all gradients of parameters are right."""
    finding = explain_backward(evidence, failure.step)
    return finding or ProofFinding("none", failure.detail, tensor=tensor_at(failure.subject))


def _replicas(evidence: JudgedEvidence, failure: Check) -> ProofFinding:
    """Name the ranks whose copies differ from the copy of the first rank."""
    run, step, name = evidence.run, failure.step, failure.subject
    of_parts = run.kinds(step) if isinstance(evidence, PlanEvidence) else ()
    for kind in dict.fromkeys((*run.value_kinds, *of_parts)):
        odd = run.differing(kind, step, name, run.whole(kind, step, name))
        if odd and kind != GRADIENTS:
            finding = ProofFinding("copies differ", failure.detail, ranks=tuple(odd))
            holders = run.holders(kind, step, name)
            return with_distinguishing_axis(evidence.axes(name), finding, odd, holders)
    return ProofFinding("copies differ", failure.detail)


def not_sharded(evidence: CapturedEvidence, failure: Check) -> ProofFinding:
    """The finding of a whole tensor where the program asks for shards, with its axis."""
    held = evidence.run.held_copies().get(failure.subject)
    ranks = held.ranks if held is not None else tuple(range(evidence.mesh.world_size))
    spanning = (axis for axis, groups in evidence.sums("") if group_of(groups, ranks[0]) == ranks)
    value = float(len(ranks))
    axis = next(spanning, "")
    return ProofFinding("not sharded", failure.detail, axis, value=value, ranks=ranks)


_NUMBERS = {
    rules.PROVE_TOKEN_COUNT.id: "token count",
    rules.PROVE_LOSS.id: "loss",
    rules.PROVE_GRADIENT_NORM.id: "gradient norm",
    rules.PROVE_LOSS_SCALE.id: "loss scale",
}
"""Names of wrong numbers, on any rank."""

_OF_ROUTES = frozenset(
    {rules.PROVE_ROUTES.id, rules.PROVE_EXPERT_LOADS.id, rules.PROVE_ROUTER_LOSSES.id}
)
"""Claims that a wrong forward pass before a router breaks, too."""

_OF_ROUTERS = frozenset(
    {rules.PROVE_EXPERT_LOADS.id, rules.PROVE_ROUTER_LOSSES.id, rules.PROVE_ROUTER_BIASES.id}
)
"""Claims whose failures have the name of a router."""


def _where(plan: Plan, tensor: str) -> str:
    """Place of a tensor (or a whole block) in the model and on the mesh."""
    specs = {spec.name: spec for spec in parameters(plan.model)}
    if tensor not in specs:
        inside = [spec for name, spec in specs.items() if name.startswith(tensor + ".")]
        return _place(plan, inside[0]) if inside else ""
    spec = specs[tensor]
    place = _place(plan, spec)
    if spec.expert is not None and plan.model.experts is not None and plan.mesh.ep > 1:
        share = spec.expert * plan.mesh.ep // plan.model.experts.num_experts
        place = f"{place}, on ep {share}"
    if plan.mesh.tp == 1 or (spec.expert is not None and pieces_of(plan, spec) == 1):
        return place
    split = (
        "replicated over tp" if spec.split_dim is None else f"dim {spec.split_dim} split over tp"
    )
    return f"{place}, {split}"


def _place(plan: Plan, spec: ParameterSpec) -> str:
    if spec.layer is not None:
        place = f"block {spec.layer} of {plan.model.layers}"
    else:
        before = spec.name.startswith(("embedding", "positions"))
        place = "before the first block" if before else "after the last block"
    return f"{place}, stage {stage_of(plan, spec)}" if plan.num_stages > 1 else place


RACE_RULES: dict[RaceKind, Rule] = {
    RaceKind.NEVER_AWAITED: rules.PROVE_AWAITED,
    RaceKind.USED: rules.PROVE_AWAITED,
    RaceKind.CHANGED: rules.PROVE_IN_FLIGHT,
    RaceKind.UNORDERED: rules.PROVE_IN_FLIGHT,
    RaceKind.FREED: rules.PROVE_FREED,
    RaceKind.USED_FREED: rules.PROVE_FREED,
    RaceKind.FREED_TWICE: rules.PROVE_FREED,
}
"""The rule that each kind of race breaks."""


def diagnose_races(
    late: LateRun | LateCapture | None, results: Sequence[ClaimResult]
) -> Diagnosis | None:
    """The first race and the first wrong value after it; None without races.

    The first one is the cause of those that follow: what is read too early is sent on.
    """
    if late is None or not late.races:
        return None
    first = min(late.races, key=lambda race: race.when_s)
    key = (first.kind, first.operation)
    alike = [race for race in late.races if (race.kind, race.operation) == key]
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


_EXPLANATIONS: Mapping[str, Callable[[Any, Check], ProofFinding]] = {
    rules.PROVE_ACTIVATIONS.id: explain_activation,
    rules.PROVE_SYSTEMATIC_ERROR.id: explain_systematic,
    rules.PROVE_SUM_DTYPE.id: explain_sum_dtype,
    rules.PROVE_RANGE.id: explain_range,
    rules.PROVE_ACTIVATION_GRADIENTS.id: _backward,
    verify_rules.VERIFY_LOCAL_GRADIENTS.id: explain_gradient,
    rules.PROVE_GRADIENTS.id: _gradient,
    rules.PROVE_OUTER_STEP.id: explain_outer,
    rules.PROVE_CLIPPED_UPDATE.id: explain_update,
    rules.PROVE_REPLAYED_UPDATE.id: explain_replayed,
    rules.PROVE_MASTER_WEIGHTS.id: explain_written_back,
    rules.PROVE_ROUTES.id: explain_routes,
    rules.PROVE_EXPERT_LOADS.id: explain_loads,
    rules.PROVE_ROUTER_LOSSES.id: explain_router_losses,
    rules.PROVE_ROUTER_BIASES.id: explain_router_state,
    rules.PROVE_INITIAL_WEIGHTS.id: explain_first_weights,
    rules.PROVE_NOTHING_DROPPED.id: _dropped,
    rules.PROVE_TOKEN_COUNT.id: _tokens,
    rules.PROVE_MICROBATCH_LOSS.id: explain_microbatch_losses,
    rules.PROVE_LOSS.id: explain_loss,
    rules.PROVE_GRADIENT_NORM.id: explain_norm,
    rules.PROVE_LOSS_SCALE.id: explain_scale,
    rules.PROVE_PARAMETERS.id: _values,
    rules.PROVE_REPLICAS.id: _replicas,
    verify_rules.VERIFY_OPTIMIZER_STATE.id: explain_optimizer_state,
    verify_rules.VERIFY_SHARDING.id: not_sharded,
}
"""What explains a failure, by the rule that it breaks."""
