"""The claims of a proof: what must hold, how far off it is, how far off it may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from echelon.core.rulebook import prove as rules
from echelon.core.rules import Rule
from echelon.prove import agreement, checks, promises, replay, routing_checks, value_checks
from echelon.prove.checks import Check, Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """State one thing that is not as claimed; `position` orders failures of one step by cause."""

    rule: Rule
    step: int
    subject: str
    error: float
    allowed: float
    detail: str
    position: int = 0


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
    failures: tuple[Failure, ...]
    note: str = ""

    @property
    def holds(self) -> bool:
        """Return whether the claim holds."""
        return not self.failures


def _no_note(_: Evidence) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Name one claim: its rule, its sentence, and the comparisons that decide it.

    `if_said` claims are about what a subject need not say; one that says nothing is not judged.
    `note` says something that only the comparisons show.
    """

    rule: Rule
    statement: str
    checks: Callable[[Evidence], Iterator[Check]] = field(repr=False)
    if_said: bool = False
    note: Callable[[Evidence], str] = field(default=_no_note, repr=False)

    def judge(self, evidence: Evidence) -> ClaimResult:
        """Return how the claim fares."""
        compared, worst, share = 0, None, -1.0
        failures: list[Failure] = []
        for check in self.checks(evidence):
            compared += 1
            # Written so that NaN fails.
            if not check.error <= check.allowed:
                failures.append(_failure(self.rule, check))
            load = _load(check)
            if load > share:
                worst, share = check, load
        return ClaimResult(
            rule=self.rule,
            statement=self.statement,
            compared=compared,
            max_error=worst.error if worst else 0.0,
            allowed=worst.allowed if worst else 0.0,
            worst=worst.subject if worst else "",
            failures=tuple(sorted(failures, key=lambda f: (f.step, f.position))),
            note=self.note(evidence),
        )


def _failure(rule: Rule, check: Check) -> Failure:
    return Failure(
        rule=rule,
        step=check.step,
        subject=check.subject,
        error=check.error,
        allowed=check.allowed,
        detail=check.detail,
        position=check.position,
    )


def _load(check: Check) -> float:
    if math.isnan(check.error):
        return math.inf
    if check.allowed == 0.0:
        return math.inf if check.error else 0.0
    return check.error / check.allowed


CLAIMS: tuple[Claim, ...] = (
    Claim(
        rule=rules.PROVE_NOTHING_DROPPED,
        statement="nothing dropped: parameters, blocks, samples",
        checks=checks.nothing_dropped,
    ),
    Claim(
        rule=rules.PROVE_INITIAL_WEIGHTS,
        statement="initial weights are the same bits",
        checks=checks.initial_weights,
    ),
    Claim(
        rule=rules.PROVE_TOKEN_COUNT,
        statement="token count is that of the global batch",
        checks=checks.token_count,
    ),
    Claim(
        rule=rules.PROVE_ROUTES,
        statement="each token goes to the experts that it goes to on one device",
        checks=routing_checks.routes,
        if_said=True,
        note=routing_checks.routes_note,
    ),
    Claim(
        rule=rules.PROVE_EXPERT_LOADS,
        statement="loads and drops of experts are those of the global batch",
        checks=routing_checks.loads,
        if_said=True,
    ),
    Claim(
        rule=rules.PROVE_ROUTER_LOSSES,
        statement="auxiliary and z-loss of the global batch, on every rank",
        checks=routing_checks.router_losses,
        if_said=True,
    ),
    Claim(
        rule=rules.PROVE_MICROBATCH_LOSS,
        statement="loss of each microbatch",
        checks=checks.microbatch_losses,
    ),
    Claim(
        rule=rules.PROVE_LOSS,
        statement="loss of the global batch, on every rank",
        checks=checks.scalar("loss", "loss"),
    ),
    Claim(
        rule=rules.PROVE_LOSS_SCALE,
        statement="loss scale and skipped steps, on every rank",
        checks=agreement.loss_scale,
        if_said=True,
    ),
    Claim(
        rule=rules.PROVE_GRADIENTS,
        statement="every gradient before clipping",
        checks=value_checks.gradients,
    ),
    Claim(
        rule=rules.PROVE_GRADIENT_NORM,
        statement="global gradient norm, on every rank",
        checks=checks.scalar("gradient norm", "grad_norm"),
    ),
    Claim(
        rule=rules.PROVE_CLIPPED_UPDATE,
        statement="every clipped update",
        checks=value_checks.updates,
    ),
    Claim(
        rule=rules.PROVE_REPLAYED_UPDATE,
        statement="every update is the formula's, of the gradients that the ranks hold",
        checks=replay.replayed_updates,
        if_said=True,
    ),
    Claim(
        rule=rules.PROVE_MASTER_WEIGHTS,
        statement="parameters are the rounding of their master copies",
        checks=value_checks.written_back,
        if_said=True,
    ),
    Claim(
        rule=rules.PROVE_PARAMETERS,
        statement="every parameter after the last step",
        checks=value_checks.parameters,
    ),
    Claim(
        rule=rules.PROVE_ROUTER_BIASES,
        statement="biases of routers, and shares of loads, after every step",
        checks=routing_checks.router_state,
        if_said=True,
    ),
    Claim(
        rule=rules.PROVE_REPLICAS,
        statement="copies hold the same bits after every step",
        checks=value_checks.replicas,
    ),
    Claim(
        rule=rules.PROVE_SCHEDULE_ORDER,
        statement="pipeline actions ran in the order of the schedule",
        checks=promises.schedule_order,
        if_said=True,
    ),
    Claim(
        rule=rules.PROVE_BYTES_SENT,
        statement="bytes sent over each axis are those of the formulas",
        checks=promises.bytes_sent,
        if_said=True,
    ),
    Claim(
        rule=rules.PROVE_BYTES_HELD,
        statement="bytes held on each rank are those of the formulas",
        checks=promises.bytes_held,
        if_said=True,
    ),
)
"""All claims, in the order in which one causes the next."""


def judge(evidence: Evidence) -> tuple[ClaimResult, ...]:
    """Return how every claim fares; those about what the subject does not say are left out."""
    judged = ((claim, claim.judge(evidence)) for claim in CLAIMS)
    return tuple(result for claim, result in judged if result.compared or not claim.if_said)


def first_failure(results: Sequence[ClaimResult]) -> Failure | None:
    """Return the failure that comes first: by step, then by cause, then by place in the model."""
    failures = [
        (failure.step, order, failure.position, failure)
        for order, result in enumerate(results)
        for failure in result.failures
    ]
    return min(failures, key=lambda entry: entry[:3])[3] if failures else None
