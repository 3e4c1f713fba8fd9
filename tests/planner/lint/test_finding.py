"""A lint is a check with an id; why it looks is what the docstring of the check says."""

from __future__ import annotations

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.planner.lint.checks import LINTS
from echelon.planner.lint.finding import LintMatch, lint_of


@lint_of("many-ranks", "time", "nobody, 2026")
def _many_ranks(plan: Plan) -> LintMatch | None:
    """More ranks than one
    are many.
    """
    ranks = plan.mesh.world_size
    return (f"{ranks} ranks", "one rank") if ranks > 1 else None


def test_a_check_becomes_a_lint_whose_docstring_is_its_reason() -> None:
    assert (_many_ranks.id, _many_ranks.severity) == ("many-ranks", "time")
    assert _many_ranks.why == "More ranks than one are many."
    assert _many_ranks.source == "nobody, 2026"
    assert _many_ranks.check(load_job("nano", ["mesh.pp=1"]).plan) is None
    two = load_job("nano", ["mesh.pp=1", "mesh.tp=2"]).plan
    assert _many_ranks.check(two) == ("2 ranks", "one rank")


def test_every_lint_says_why_it_looks_and_where_that_is_from() -> None:
    assert len({one.id for one in LINTS}) == len(LINTS)
    assert all(one.why.endswith(".") and "  " not in one.why and one.source for one in LINTS)
