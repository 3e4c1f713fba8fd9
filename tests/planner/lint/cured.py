"""What holds of a lint for the tests of each room: a plan with its fault, and one without."""

from __future__ import annotations

from echelon.planner.lint.checks import lint
from tests.handbook.guides.situations import plan_of


def assert_found_and_cured(name: str, bad: str, good: str) -> None:
    """Hold a lint to finding its fault in `bad`, with numbers and a cure, and nothing in `good`."""
    found = {finding.id: finding for finding in lint(plan_of(bad))}
    assert name in found
    assert any(letter.isdigit() for letter in found[name].message)
    assert found[name].do
    assert name not in {finding.id for finding in lint(plan_of(good))}
