# SPDX-License-Identifier: Apache-2.0
"""The cases in which a narrow number overflows or vanishes: weights much larger, and much smaller.

Normal weights give scores and logits of about 1 and gradients that any dtype holds: a softmax that
subtracts no maximum, or a gradient that is rounded before it is scaled, is right there. So a plan
of few digits takes one step more with weights so large that scores go far beyond 88, where the exp
of float32 ends, and one with weights so small that gradients reach the end of the dtype. Numbers
say little then; whether there are any says all: what one device has in this precision, the ranks
must have.

A zero is missed only in the place of a number that means something. A softmax with one score far
above all others passes back a gradient that is zero but for rounding, and whether rounding leaves
one says nothing. So what counts is numbers that one device in this precision and one in float64
agree about to within their half.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from echelon.core.plan import Plan
from echelon.core.rulebook import prove as rules
from echelon.proof.claims.checks import Check, copies_at, whole_activation
from echelon.proof.claims.claims import ClaimResult, judged
from echelon.proof.claims.tolerance import is_low
from echelon.proof.evidence.fits import NUM_STANDARD_ERRORS
from echelon.proof.observed import ObservedRun, routing_from_ranks
from echelon.proof.oracle.loss_scale import scale_without_overflow, with_scale
from echelon.proof.oracle.oracle import OracleStep, run_oracle

LARGE = (64.0, 32.0, 16.0, 8.0, 4.0, 2.0)
"""Factors of the weights that are tried, until one device has numbers throughout."""

SMALL = 2.0**-5
"""The factor of weights whose gradients are tiny."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeCase:
    """Hold a plan whose weights are `factor` times as large, and one device in its precision."""

    factor: float
    plan: Plan

    @property
    def words(self) -> str:
        """Return the case in words."""
        return f"with weights {self.factor:g} times as large"


def range_cases(own: Plan) -> list[RangeCase]:
    """Return the cases of a shrunk plan in its own precision: none where it has many digits."""
    if not is_low(own):
        return []
    return [*_large(own), RangeCase(factor=SMALL, plan=_scaled(own, SMALL))]


def _large(own: Plan) -> Iterator[RangeCase]:
    for factor in LARGE:
        plan = _scaled(own, factor)
        (step,) = run_oracle(plan, 1)
        if _is_finite(step):
            yield RangeCase(factor=factor, plan=plan)
            return


def _scaled(own: Plan, factor: float) -> Plan:
    model = replace(own.model, initial_std=own.model.initial_std * factor)
    plan = replace(own, mathematics=replace(own.mathematics, model=model))
    if own.mathematics.precision.loss_scaling == "none":
        return plan
    return with_scale(plan, scale_without_overflow(plan, in_float64(plan), 1))


def in_float64(plan: Plan) -> Plan:
    """Return a plan in float64 throughout."""
    wide = replace(
        plan.mathematics.precision,
        parameters="fp64",
        gradients="fp64",
        reduction="fp64",
        master="fp64",
    )
    return replace(plan, mathematics=replace(plan.mathematics, precision=wide))


def _is_finite(step: OracleStep) -> bool:
    every = [*step.activations.values(), *step.activation_gradients.values()]
    every += step.gradients.values()
    return math.isfinite(step.loss) and all(bool(one.isfinite().all()) for one in every)


def judge_ranges(cases: Sequence[tuple[RangeCase, ObservedRun]]) -> ClaimResult:
    """Return whether the ranks have numbers in each case wherever one device has."""
    checks = [check for case, observed in cases for check in range_checks(case, observed)]
    statement = "numbers that are large or tiny neither overflow nor vanish"
    return judged(rules.PROVE_RANGE, statement, checks)


def range_checks(case: RangeCase, observed: ObservedRun) -> Iterator[Check]:
    """Compare where one device and the ranks have numbers, in the order of a step."""
    forced = routing_from_ranks(observed, 1)
    (rough,) = run_oracle(case.plan, 1, forced=forced)
    (exact,) = run_oracle(in_float64(case.plan), 1, forced=forced)
    for position, numbers in enumerate(_compared(case, observed, rough, exact)):
        yield _check(case, numbers, position)


@dataclass(frozen=True, slots=True)
class NumbersOfThree:
    """Hold one tensor of the ranks, of one device in their precision, and in float64."""

    name: str
    seen: torch.Tensor
    rough: torch.Tensor
    exact: torch.Tensor

    def more_zeros(self) -> torch.Tensor:
        """Return how many more zeros than one device the ranks have, of each row."""
        exact = self.exact.double()
        zeros = [
            (one == 0) & ((other.double() - exact).abs() < exact.abs() / 2)
            for one, other in ((self.seen, self.rough), (self.rough, self.seen))
        ]
        return (zeros[0].double() - zeros[1].double()).reshape(-1, self.rough.shape[-1]).sum(-1)


def _check(case: RangeCase, numbers: NumbersOfThree, position: int) -> Check:
    """Compare where there are numbers, then how many of them are zero."""
    name, seen, rough = numbers.name, numbers.seen, numbers.rough
    lost = int((rough.isfinite() & ~seen.isfinite()).sum())
    if lost:
        detail = f"{case.words}, {lost} of {rough.numel()} numbers overflow"
        return Check(0, name, lost / rough.numel(), detail=detail, position=position)
    # Next to the smallest number rounding makes zeros on either side alike, row by row.
    more = numbers.more_zeros()
    vanished = max(0.0, float(more.sum()))
    chance = NUM_STANDARD_ERRORS * float(more.norm()) * bool(seen.any())
    detail = f"{case.words}, {vanished:.0f} of {rough.numel()} numbers are zero"
    share, allowed = vanished / rough.numel(), chance / rough.numel()
    return Check(0, name, share, allowed=allowed, detail=detail, position=position)


def _compared(
    case: RangeCase, observed: ObservedRun, rough: OracleStep, exact: OracleStep
) -> Iterator[NumbersOfThree]:
    for gradient, ours, wide in (
        (False, rough.activations, exact.activations),
        (True, rough.activation_gradients, exact.activation_gradients),
    ):
        copies = copies_at(case.plan, observed, rough.step, gradient=gradient)
        prefix = "gradient of " * gradient
        for name, right in ours.items() if not rough.skipped else ():
            if name in copies:
                seen = whole_activation(copies[name], right)
                yield NumbersOfThree(f"{prefix}{name}", seen, right, wide[name])
        if not gradient:
            yield _losses(observed, rough, exact)
    for name, right in reversed(list(rough.gradients.items())) if not rough.skipped else ():
        seen = observed.whole("gradients", rough.step, name)
        yield NumbersOfThree(name, seen, right, exact.gradients[name])


def _losses(observed: ObservedRun, rough: OracleStep, exact: OracleStep) -> NumbersOfThree:
    told = observed.microbatch_losses(rough.step)
    slots = [slot for slot in rough.microbatch_losses if slot in told]
    ours, wide = (
        torch.tensor([step.microbatch_losses[slot][0] for slot in slots]) for step in (rough, exact)
    )
    return NumbersOfThree("loss", torch.tensor([told[slot][0][0] for slot in slots]), ours, wide)
