"""The first race in time is told, with its operation, its axis and what became wrong by it."""

from __future__ import annotations

from echelon.core.rulebook import prove as rules
from echelon.parallel.completion.in_flight import Race, RaceKind
from echelon.proof.causes.diagnose import diagnose_races
from echelon.proof.claims.checks import Check
from echelon.proof.claims.claims import ClaimResult
from echelon.proof.late import LateRun


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
