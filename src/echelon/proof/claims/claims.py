# SPDX-License-Identifier: Apache-2.0
"""The claims of a proof in the order in which one causes the next, and how each fares.

Sums that are rounded on their way are a run of their own: judged by their bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from echelon.core.rulebook import prove as rules
from echelon.core.rulebook import verify as verify_rules
from echelon.core.rulebook import weights as lora_rules
from echelon.core.rules import Rule
from echelon.parallel.completion.in_flight import RaceKind
from echelon.proof.claims import (
    captured_checks,
    checks,
    islands,
    late_checks,
    predictions,
    routing_checks,
    systematic,
    taken,
    value_checks,
)
from echelon.proof.claims import checks as activation_checks
from echelon.proof.claims.checks import Check
from echelon.proof.claims.late_checks import same_bits
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.claims.predictions import bytes_sent
from echelon.proof.evidence.evidence import AnyEvidence, CapturedEvidence, Evidence
from echelon.proof.observed import ObservedRun
from echelon.proof.sum_bounds import NUM_STEPS, SumNote


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimResult:
    """Hold how one claim fared in one precision.

    `worst` is the tensor (or number) whose error is the largest share of what it may be; `note`
    says what else there is to know.
    """

    rule: Rule
    statement: str
    compared: int
    max_error: float
    allowed: float
    worst: str
    failures: tuple[Check, ...]
    note: str = ""

    @property
    def holds(self) -> bool:
        """Return whether the claim holds."""
        return not self.failures


def _no_note(_: Any, checks: Sequence[Check]) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class ProofClaim:
    """Name one claim: its rule, its sentence, the comparisons that decide it, and what they need.

    `needs` is the evidence that the comparisons read. Nothing is claimed of any other, nor where
    there was nothing to compare. `note` says something that only the comparisons show.
    """

    rule: Rule
    statement: str
    checks: Callable[[Any], Iterator[Check]] = field(repr=False)
    needs: type[Any] = PlanEvidence
    _: KW_ONLY
    note: Callable[[Any, Sequence[Check]], str] = field(default=_no_note, repr=False)

    def judge(self, evidence: object) -> ClaimResult | None:
        """Return how the claim fares; None where it has nothing to compare."""
        checks = list(self.checks(evidence)) if isinstance(evidence, self.needs) else []
        if not checks:
            return None
        return judged(self.rule, self.statement, checks, self.note(evidence, checks))


def judged(rule: Rule, statement: str, checks: Sequence[Check], note: str = "") -> ClaimResult:
    """Return how a claim fares that these comparisons decide."""
    worst = max(checks, key=_load, default=Check(0, "", 0.0))
    # Written so that NaN fails.
    failures = [check for check in checks if not check.error <= check.allowed]
    return ClaimResult(
        rule=rule,
        statement=statement,
        compared=len(checks),
        max_error=worst.error,
        allowed=worst.allowed,
        worst=worst.subject,
        failures=tuple(sorted(failures, key=lambda f: (f.step, f.position))),
        note=note,
    )


def _load(check: Check) -> float:
    if math.isnan(check.error):
        return math.inf
    if check.allowed == 0.0:
        return math.inf if check.error else 0.0
    return check.error / check.allowed


RACE_CLAIMS: tuple[ProofClaim, ...] = (
    ProofClaim(
        rules.PROVE_AWAITED,
        "every operation is awaited before its result is used",
        late_checks.races(RaceKind.NEVER_AWAITED, RaceKind.USED),
        note=late_checks.operations_note,
    ),
    ProofClaim(
        rules.PROVE_IN_FLIGHT,
        "what an operation reads and fills is left alone until it is awaited",
        late_checks.races(RaceKind.CHANGED, RaceKind.UNORDERED),
    ),
    ProofClaim(
        rules.PROVE_FREED,
        "memory is given back once, and when nobody uses it any more",
        late_checks.races(RaceKind.FREED, RaceKind.USED_FREED, RaceKind.FREED_TWICE),
    ),
)
"""The claims of a run with late completion that need nothing but what its ranks found."""

CLAIMS: tuple[ProofClaim, ...] = (
    *RACE_CLAIMS,
    *(replace(claim, needs=CapturedEvidence) for claim in RACE_CLAIMS[:2]),
    ProofClaim(
        rules.PROVE_NOTHING_DROPPED,
        "nothing dropped: parameters, blocks, samples",
        checks.nothing_dropped,
    ),
    ProofClaim(
        rules.PROVE_NOTHING_DROPPED,
        "every parameter is on some rank, and has a gradient",
        captured_checks.nothing_dropped,
        CapturedEvidence,
    ),
    ProofClaim(
        rules.PROVE_INITIAL_WEIGHTS, "initial weights are the same bits", checks.initial_weights
    ),
    ProofClaim(
        rules.PROVE_INITIAL_WEIGHTS,
        "first weights are those of one device",
        captured_checks.initial_weights,
        CapturedEvidence,
    ),
    ProofClaim(
        rules.PROVE_TOKEN_COUNT, "token count is that of the global batch", checks.token_count
    ),
    ProofClaim(
        rules.PROVE_ROUTES,
        "each token goes to the experts that it goes to on one device",
        routing_checks.routes,
        note=routing_checks.routes_note,
    ),
    ProofClaim(
        rules.PROVE_EXPERT_LOADS,
        "loads and drops of experts are those of the global batch",
        routing_checks.loads,
    ),
    ProofClaim(
        rules.PROVE_ROUTER_LOSSES,
        "auxiliary and z-loss of the global batch, on every rank",
        routing_checks.router_losses,
    ),
    ProofClaim(
        rules.PROVE_ACTIVATIONS,
        "what passes between the parts of the model, token by token",
        activation_checks.activations,
    ),
    ProofClaim(
        rules.PROVE_SYSTEMATIC_ERROR,
        "what low precision is off by is rounding, not a factor",
        systematic.systematic_errors,
    ),
    ProofClaim(rules.PROVE_MICROBATCH_LOSS, "loss of each microbatch", checks.microbatch_losses),
    ProofClaim(rules.PROVE_LOSS, "loss of the global batch, on every rank", checks.losses),
    ProofClaim(rules.PROVE_LOSS, "loss of the whole batch", captured_checks.loss, CapturedEvidence),
    ProofClaim(
        rules.PROVE_LOSS_SCALE,
        "loss scale and skipped steps, on every rank",
        value_checks.loss_scale,
    ),
    ProofClaim(
        verify_rules.VERIFY_LOCAL_GRADIENTS,
        "gradients of all ranks add up, before they are reduced",
        captured_checks.local_gradients,
        CapturedEvidence,
    ),
    ProofClaim(rules.PROVE_GRADIENTS, "every gradient before clipping", value_checks.gradients),
    ProofClaim(
        rules.PROVE_GRADIENTS,
        "every gradient that the optimizer takes",
        taken.gradients,
        CapturedEvidence,
        note=taken.by_update_note,
    ),
    ProofClaim(
        rules.PROVE_SUM_DTYPE,
        "gradients that are float32 sums have the digits of such",
        systematic.sum_dtypes,
    ),
    ProofClaim(
        rules.PROVE_ACTIVATION_GRADIENTS,
        "gradients between the parts of the model, token by token",
        activation_checks.activation_gradients,
    ),
    ProofClaim(
        rules.PROVE_GRADIENT_NORM,
        "global gradient norm, on every rank",
        value_checks.gradient_norms,
    ),
    ProofClaim(
        rules.PROVE_GRADIENT_NORM,
        "gradient norm that the program tells",
        value_checks.gradient_norms,
        CapturedEvidence,
    ),
    ProofClaim(
        rules.PROVE_OUTER_STEP,
        "outer parameters and momentum are those of the mean of all islands",
        islands.outer_steps,
    ),
    ProofClaim(
        rules.PROVE_ISLANDS_AGREE,
        "outer state has the same bits on all islands",
        islands.islands_agree,
    ),
    ProofClaim(
        verify_rules.VERIFY_OPTIMIZER_STATE,
        "optimizer state after every step",
        captured_checks.optimizer_state,
        CapturedEvidence,
    ),
    ProofClaim(rules.PROVE_CLIPPED_UPDATE, "every clipped update", value_checks.updates_of_plan),
    ProofClaim(rules.PROVE_CLIPPED_UPDATE, "every update", value_checks.updates, CapturedEvidence),
    ProofClaim(
        rules.PROVE_REPLAYED_UPDATE,
        "every update is the formula's, of the gradients that the ranks hold",
        value_checks.replayed_updates,
    ),
    ProofClaim(
        rules.PROVE_MASTER_WEIGHTS,
        "parameters are the rounding of their master copies",
        value_checks.written_back,
    ),
    ProofClaim(
        rules.PROVE_PARAMETERS,
        "every parameter after the last step",
        value_checks.parameters,
        Evidence,
    ),
    ProofClaim(
        rules.PROVE_ROUTER_BIASES,
        "biases of routers, and shares of loads, after every step",
        routing_checks.router_state,
    ),
    ProofClaim(
        lora_rules.PROVE_FROZEN,
        "what is frozen has the bits that it began with, and no gradient",
        value_checks.frozen,
    ),
    ProofClaim(
        rules.PROVE_REPLICAS, "copies hold the same bits after every step", value_checks.replicas
    ),
    ProofClaim(
        rules.PROVE_REPLICAS,
        "copies stay the same on all ranks",
        captured_checks.replicas,
        CapturedEvidence,
        note=captured_checks.same_bits_note,
    ),
    ProofClaim(
        verify_rules.VERIFY_SHARDING,
        "ranks hold shards where the program asks for them",
        captured_checks.sharding,
        CapturedEvidence,
    ),
    ProofClaim(
        rules.PROVE_SCHEDULE_ORDER,
        "pipeline actions ran in the order of the schedule",
        predictions.schedule_order,
    ),
    ProofClaim(
        rules.PROVE_BYTES_SENT,
        "bytes sent over each axis are those of the formulas",
        predictions.bytes_sent,
    ),
    ProofClaim(
        rules.PROVE_BYTES_HELD,
        "bytes held on each rank are those of the formulas",
        predictions.bytes_held,
    ),
    ProofClaim(
        rules.PROVE_LATE,
        "the same bits when operations complete as late as they may",
        late_checks.same_bits,
    ),
)
"""All claims, in the order in which one causes the next."""


def judge(evidence: AnyEvidence) -> tuple[ClaimResult, ...]:
    """Return how every claim fares that has something to compare in this evidence."""
    return judge_claims(CLAIMS, evidence)


def judge_races(evidence: PlanEvidence) -> tuple[ClaimResult, ...]:
    """Return how the claims fare that need nothing but the races: no rank said anything else."""
    return judge_claims(RACE_CLAIMS, evidence)


def judge_claims(claims: Sequence[ProofClaim], evidence: object) -> tuple[ClaimResult, ...]:
    """Return how each of these claims fares that has something to compare in this evidence."""
    results = (claim.judge(evidence) for claim in claims)
    return tuple(result for result in results if result is not None)


def first_failure(results: Sequence[ClaimResult]) -> tuple[ClaimResult, Check] | None:
    """Return the failure that comes first: by step, then by cause, then by place in the model."""
    failures = [
        (failure.step, order, failure.position, result, failure)
        for order, result in enumerate(results)
        for failure in result.failures
    ]
    return min(failures, key=lambda entry: entry[:3])[3:] if failures else None


WITHIN_BOUNDS = "rounded sums are off by no more than half a step of each rounding"
SAME_BITS = "late completion changes no bit where sums are rounded"
BYTES_OF_HOPS = "bytes sent equal the formulas where sums are rounded"


def judge_sums(evidence: PlanEvidence, observed: ObservedRun) -> tuple[ClaimResult, ...]:
    """Return whether rounded sums keep to their bounds, and to their bytes in the first step.

    `evidence` is that of exact sums: both runs begin with the same parameters. With late completion
    the rounded sums, too, must be the same bit for bit.
    """
    kind = observed.plan.layout.zero.reduce
    checks = [_check(note, kind, position) for position, note in enumerate(observed.sums)]
    first = replace(evidence, plan=observed.plan, steps=evidence.steps[:1], run=observed, late=None)
    return (
        judged(rules.PROVE_QUANTISED_SUMS, WITHIN_BOUNDS, checks),
        judged(rules.PROVE_BYTES_SENT, BYTES_OF_HOPS, list(bytes_sent(first))),
        *_late_bits(evidence, observed),
    )


def _late_bits(evidence: PlanEvidence, observed: ObservedRun) -> tuple[ClaimResult, ...]:
    """Return whether the run with late completion had the same bits, where there was one."""
    late = evidence.late
    if late is None or late.rounded is None:
        return ()
    both = replace(
        evidence,
        plan=observed.plan,
        steps=evidence.steps[:NUM_STEPS],
        run=observed,
        late=replace(late, observed=late.rounded),
    )
    return (judged(rules.PROVE_LATE, SAME_BITS, list(same_bits(both))),)


def _check(note: SumNote, kind: str, position: int) -> Check:
    """Compare one tensor of a rank's slice: the error is its share of the bound."""
    return Check(
        note.step,
        note.name,
        note.error / note.bound if note.bound else math.inf if note.error else 0.0,
        allowed=1.0,
        detail=f"a sum is off by {note.error:.3g}, where rounding to {kind} makes it off by "
        f"{note.bound:.3g} at most",
        position=position,
    )
