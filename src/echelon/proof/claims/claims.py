# SPDX-License-Identifier: Apache-2.0
"""The claims of a proof: what must hold, how far off it is, how far off it may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from echelon.core.rulebook import prove as rules
from echelon.core.rulebook import races as race_rules
from echelon.core.rulebook import weights as lora_rules
from echelon.core.rules import Rule
from echelon.parallel.completion.in_flight import RaceKind
from echelon.proof.claims import (
    activation_checks,
    checks,
    frozen_checks,
    late_checks,
    outer_checks,
    predictions,
    routing_checks,
    systematic,
    value_checks,
)
from echelon.proof.claims.checks import Check, Evidence


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


def _no_note(_: Evidence) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class ProofClaim:
    """Name one claim: its rule, its sentence, and the comparisons that decide it.

    `only_if_reported` claims are about what a subject need not say; one that says nothing is not
    judged. `note` says something that only the comparisons show.
    """

    rule: Rule
    statement: str
    checks: Callable[[Evidence], Iterator[Check]] = field(repr=False)
    only_if_reported: bool = False
    note: Callable[[Evidence], str] = field(default=_no_note, repr=False)

    def judge(self, evidence: Evidence) -> ClaimResult:
        """Return how the claim fares."""
        checks = list(self.checks(evidence))
        return judged(self.rule, self.statement, checks, self.note(evidence))


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


def _if_reported(
    rule: Rule,
    statement: str,
    checks: Callable[[Evidence], Iterator[Check]],
    note: Callable[[Evidence], str] = _no_note,
) -> ProofClaim:
    return ProofClaim(rule, statement, checks, only_if_reported=True, note=note)


RACE_CLAIMS: tuple[ProofClaim, ...] = (
    _if_reported(
        race_rules.PROVE_AWAITED,
        "every operation is awaited before its result is used",
        late_checks.races(RaceKind.NEVER_AWAITED, RaceKind.USED),
        note=late_checks.operations_note,
    ),
    _if_reported(
        race_rules.PROVE_IN_FLIGHT,
        "what an operation reads and fills is left alone until it is awaited",
        late_checks.races(RaceKind.CHANGED),
    ),
    _if_reported(
        race_rules.PROVE_FREED,
        "memory is given back once, and when nobody uses it any more",
        late_checks.races(RaceKind.FREED, RaceKind.USED_FREED, RaceKind.FREED_TWICE),
    ),
)
"""The claims of a run with late completion that need nothing but what its ranks found."""

CLAIMS: tuple[ProofClaim, ...] = (
    *RACE_CLAIMS,
    ProofClaim(
        rules.PROVE_NOTHING_DROPPED,
        "nothing dropped: parameters, blocks, samples",
        checks.nothing_dropped,
    ),
    ProofClaim(
        rules.PROVE_INITIAL_WEIGHTS, "initial weights are the same bits", checks.initial_weights
    ),
    ProofClaim(
        rules.PROVE_TOKEN_COUNT, "token count is that of the global batch", checks.token_count
    ),
    _if_reported(
        rules.PROVE_ROUTES,
        "each token goes to the experts that it goes to on one device",
        routing_checks.routes,
        note=routing_checks.routes_note,
    ),
    _if_reported(
        rules.PROVE_EXPERT_LOADS,
        "loads and drops of experts are those of the global batch",
        routing_checks.loads,
    ),
    _if_reported(
        rules.PROVE_ROUTER_LOSSES,
        "auxiliary and z-loss of the global batch, on every rank",
        routing_checks.router_losses,
    ),
    _if_reported(
        rules.PROVE_ACTIVATIONS,
        "what passes between the parts of the model, token by token",
        activation_checks.activations,
    ),
    _if_reported(
        rules.PROVE_SYSTEMATIC_ERROR,
        "what low precision is off by is rounding, not a factor",
        systematic.systematic_errors,
    ),
    ProofClaim(rules.PROVE_MICROBATCH_LOSS, "loss of each microbatch", checks.microbatch_losses),
    ProofClaim(
        rules.PROVE_LOSS, "loss of the global batch, on every rank", checks.scalar("loss", "loss")
    ),
    _if_reported(
        rules.PROVE_LOSS_SCALE,
        "loss scale and skipped steps, on every rank",
        value_checks.loss_scale,
    ),
    ProofClaim(rules.PROVE_GRADIENTS, "every gradient before clipping", value_checks.gradients),
    _if_reported(
        rules.PROVE_SUM_DTYPE,
        "gradients that are float32 sums have the digits of such",
        systematic.sum_dtypes,
    ),
    _if_reported(
        rules.PROVE_ACTIVATION_GRADIENTS,
        "gradients between the parts of the model, token by token",
        activation_checks.activation_gradients,
    ),
    ProofClaim(
        rules.PROVE_GRADIENT_NORM,
        "global gradient norm, on every rank",
        checks.scalar("gradient norm", "grad_norm"),
    ),
    _if_reported(
        rules.PROVE_OUTER_STEP,
        "outer parameters and momentum are those of the mean of all islands",
        outer_checks.outer_steps,
    ),
    _if_reported(
        rules.PROVE_ISLANDS_AGREE,
        "outer state has the same bits on all islands",
        outer_checks.islands_agree,
    ),
    ProofClaim(rules.PROVE_CLIPPED_UPDATE, "every clipped update", value_checks.updates),
    _if_reported(
        rules.PROVE_REPLAYED_UPDATE,
        "every update is the formula's, of the gradients that the ranks hold",
        value_checks.replayed_updates,
    ),
    _if_reported(
        rules.PROVE_MASTER_WEIGHTS,
        "parameters are the rounding of their master copies",
        value_checks.written_back,
    ),
    ProofClaim(
        rules.PROVE_PARAMETERS, "every parameter after the last step", value_checks.parameters
    ),
    _if_reported(
        rules.PROVE_ROUTER_BIASES,
        "biases of routers, and shares of loads, after every step",
        routing_checks.router_state,
    ),
    _if_reported(
        lora_rules.PROVE_FROZEN,
        "what is frozen has the bits that it began with, and no gradient",
        frozen_checks.frozen,
    ),
    ProofClaim(
        rules.PROVE_REPLICAS, "copies hold the same bits after every step", value_checks.replicas
    ),
    _if_reported(
        rules.PROVE_SCHEDULE_ORDER,
        "pipeline actions ran in the order of the schedule",
        predictions.schedule_order,
    ),
    _if_reported(
        rules.PROVE_BYTES_SENT,
        "bytes sent over each axis are those of the formulas",
        predictions.bytes_sent,
    ),
    _if_reported(
        rules.PROVE_BYTES_HELD,
        "bytes held on each rank are those of the formulas",
        predictions.bytes_held,
    ),
    _if_reported(
        race_rules.PROVE_LATE,
        "the same bits when operations complete as late as they may",
        late_checks.same_bits,
    ),
)
"""All claims, in the order in which one causes the next."""


def judge(evidence: Evidence) -> tuple[ClaimResult, ...]:
    """Return how every claim fares; those about what the subject does not say are left out."""
    judged = ((claim, claim.judge(evidence)) for claim in CLAIMS)
    return tuple(
        result for claim, result in judged if result.compared or not claim.only_if_reported
    )


def judge_races(evidence: Evidence) -> tuple[ClaimResult, ...]:
    """Return how the claims fare that need nothing but the races: no rank said anything else."""
    judged = (claim.judge(evidence) for claim in RACE_CLAIMS)
    return tuple(result for result in judged if result.compared)


def first_failure(results: Sequence[ClaimResult]) -> tuple[ClaimResult, Check] | None:
    """Return the failure that comes first: by step, then by cause, then by place in the model."""
    failures = [
        (failure.step, order, failure.position, result, failure)
        for order, result in enumerate(results)
        for failure in result.failures
    ]
    return min(failures, key=lambda entry: entry[:3])[3:] if failures else None
