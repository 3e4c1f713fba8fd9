"""What is wrong in a narrow dtype only has a name and a value."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.rulebook import prove as rules
from echelon.parallel.completion.in_flight import Race, RaceKind
from echelon.proof.causes.diagnose import (
    diagnose_races,
    explain_range,
    explain_sum_dtype,
    explain_systematic,
)
from echelon.proof.claims.checks import Check
from echelon.proof.claims.claims import ClaimResult
from echelon.proof.claims.systematic import systematic_errors
from echelon.proof.claims.tolerance import own_tolerance
from echelon.proof.late import LateRun
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.ranks import ObservedActivation
from echelon.proof.shrink import shrink
from tests.proof.layouts import BF16, layout
from tests.proof.replicas import replicas


def test_a_factor_within_rounding_is_told_with_its_standard_error() -> None:
    plan = shrink(layout(precision=BF16))
    exact = run_oracle(shrink(layout(precision=BF16), precision="fp64"), 1)
    rough = run_oracle(plan, 1)

    def larger(one: ObservedActivation) -> ObservedActivation:
        of = one.name == "layers.1.attention" and not one.gradient
        return replace(one, values_nW=one.values_nW * 1.02) if of else one

    evidence = replace(
        replicas(plan, activation=larger),
        steps=exact,
        rounded=[rough],
        tolerance=own_tolerance(plan, exact, [rough], has_masters=False),
    )
    (failure,) = (check for check in systematic_errors(evidence) if check.error > check.allowed)
    found = explain_systematic(evidence, failure)
    assert (found.factor, found.tensor) == ("number", "layers.1.attention")
    assert found.value == pytest.approx(1.02, abs=2e-3)
    assert "a factor, not rounding" in found.description


def test_sums_and_ends_of_a_dtype_say_what_was_seen() -> None:
    evidence = replicas(shrink(layout(), precision="fp64"))
    few = Check(0, "head.weight", 4.0, detail="8.0 binary digits instead of 12.1")
    assert explain_sum_dtype(evidence, few).factor == "rounded sum"
    lost = Check(0, "loss", 1.0, detail="with weights 64 times as large, 1 of 1 numbers overflow")
    assert explain_range(evidence, lost).factor == "not finite"
    zero = Check(0, "loss", 1.0, detail="with weights 0.03 times as large, 9 of 9 numbers are zero")
    assert explain_range(evidence, zero).factor == "vanished"


def race(operation: str, when_s: float, rank: int = 0, step: int = 0) -> Race:
    """Return a race of one operation."""
    return Race(
        kind=RaceKind.USED,
        operation=operation,
        axis="dp",
        step=step,
        rank=rank,
        at="engine.py:3 in step",
        says="its result is used by mm",
        when_s=when_s,
    )


def test_the_first_race_is_the_cause() -> None:
    races = (race("send x", 3.0), race("all_reduce y", 1.5, rank=1), race("all_reduce y", 2.0))
    late = LateRun(races=races, num_operations=(4, 5), observed=None)
    wrong = ClaimResult(
        rule=rules.PROVE_GRADIENTS,
        statement="every gradient before clipping",
        compared=1,
        max_error=1.0,
        allowed=0.0,
        worst="head.weight",
        failures=(Check(2, "head.weight", 1.0),),
    )

    found = diagnose_races(late, [wrong])

    assert found is not None
    assert (found.rule, found.tensor, found.axis) == ("prove-awaited", "all_reduce y", "dp")
    assert found.ranks == (0, 1)
    assert (found.num_wrong, found.num_compared) == (2, 9)
    assert found.sentence() == (
        "first wrong: all_reduce y (at engine.py:3 in step): used before it was awaited: its "
        "result is used by mm; the first wrong value is head.weight in step 2 (every gradient "
        "before clipping) [axis dp]"
    )


def test_without_races_there_is_nothing_to_tell() -> None:
    assert diagnose_races(None, []) is None
    assert diagnose_races(LateRun(races=(), num_operations=(1,), observed=None), []) is None
