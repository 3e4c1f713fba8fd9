"""What ties between 8-bit numbers are worth: nothing where there are none."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.plan import Plan
from echelon.core.rulebook import prove as rules
from echelon.proof.claims.checks import Check
from echelon.proof.claims.claims import judged
from echelon.proof.claims.ties import may_be_ties, tie_tolerance
from echelon.proof.claims.tolerance import FLOAT64_TOLERANCE
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.shrink import shrink
from tests.parallel.test_fp8_linear import FP8, SCATTERED, latent
from tests.proof.layouts import layout

PLAIN = shrink(layout(precision=FP8), precision="fp64")
NARROW = shrink(latent(layout(**SCATTERED, precision=FP8)), precision="fp64")


def largest(plan: Plan) -> float:
    """Return the largest error of a gradient that is allowed in two steps."""
    oracle = run_oracle(plan, 2)
    tolerance = tie_tolerance(plan, oracle)
    assert not tolerance.own_precision
    names = [(step.step, name) for step in oracle for name in step.gradients]
    return max(tolerance.allowed("gradients", step, name) for step, name in names)


def test_without_ties_nothing_is_added() -> None:
    assert largest(PLAIN) == FLOAT64_TOLERANCE


def test_ties_are_worth_what_they_change() -> None:
    assert FLOAT64_TOLERANCE < largest(NARROW) < 1e-2


def test_only_what_is_a_little_off_in_8_bits_is_looked_at_again() -> None:
    def results(check: Check) -> list[object]:
        return [judged(rules.PROVE_GRADIENTS, "gradients", [check])]

    off = Check(0, "head.weight", 1e-6, allowed=1e-10)
    assert may_be_ties(PLAIN, results(off))  # type: ignore[arg-type]
    assert not may_be_ties(PLAIN, results(replace(off, error=1e-12)))  # type: ignore[arg-type]
    assert not may_be_ties(PLAIN, results(Check(0, "a count", 1.0)))  # type: ignore[arg-type]
    wide = replace(
        PLAIN, mathematics=replace(PLAIN.mathematics, precision=layout().mathematics.precision)
    )
    assert not may_be_ties(wide, results(off))  # type: ignore[arg-type]
