"""Finders over one View: what they find is told, and only changes that mend it are suggested."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.config.entries import Entry
from echelon.config.rules.violations import (
    RuleViolation,
    Trial,
    find_problems,
    find_violations,
    setting_without_effect,
)
from echelon.config.view import Unavailable, View
from echelon.core.rulebook.mesh import TP_DIVIDES_HEADS


def view_of(**degrees: int) -> View:
    """Return settings of the mesh, as a file has them."""
    return View(
        entries={f"mesh.{axis}": Entry(value=n, source="a.toml:3") for axis, n in degrees.items()}
    )


def tp_divides_12(view: View) -> Iterator[RuleViolation]:
    tp = view.integer("mesh.tp")
    if 12 % tp:
        yield RuleViolation(
            rule=TP_DIVIDES_HEADS,
            key="mesh.tp",
            message=f"tp = {tp}",
            set_by=("mesh.tp", "mesh.pp"),
            suggestions=(
                "fewer ranks",
                ({"mesh.tp": n} for n in (4, 6, 7, 12, 3)),
                lambda trial: trial.first([{"mesh.tp": 2, "mesh.pp": 2}]),
            ),
        )


def at_most_8_ranks(view: View) -> Iterator[RuleViolation]:
    if view.integer("mesh.tp") * view.integer("mesh.pp") > 8:
        yield RuleViolation(rule="fits", key="mesh", message="too many")


FINDERS = (tp_divides_12, at_most_8_ranks)


def test_a_suggestion_mends_its_fault_and_breaks_nothing() -> None:
    (problem,) = find_problems(view_of(tp=5), FINDERS)
    assert (problem.rule, problem.key, problem.message) == ("tp-divides-heads", "mesh.tp", "tp = 5")
    assert problem.set_by == "a.toml:3 (mesh.tp)"
    assert problem.suggestions == (
        "fewer ranks",
        "mesh.tp = 4",
        "mesh.tp = 6",
        "mesh.tp = 2 with mesh.pp = 2",
    )


def test_what_mends_another_fault_only_is_no_advice() -> None:
    first, second = find_problems(view_of(tp=5, pp=4), FINDERS)
    # With pp 4 only tp 2 is within 8 ranks: 4 and 6 mend the first fault, and break nothing new.
    assert first.suggestions[1:3] == ("mesh.tp = 4", "mesh.tp = 6")
    assert (second.rule, second.suggestions) == ("fits", ())


def test_finders_that_are_not_told_still_judge_suggestions() -> None:
    (problem,) = find_problems(view_of(tp=5, pp=2), FINDERS, (tp_divides_12,))
    assert "mesh.tp = 4" in problem.suggestions
    assert find_problems(view_of(tp=4), FINDERS) == []


def test_what_cannot_be_judged_is_skipped() -> None:
    wrong = View(entries={}, wrong=frozenset(("mesh.tp",)))
    assert list(find_violations(wrong, FINDERS)) == []

    def unknown(_: Trial) -> list[str]:
        raise Unavailable("mesh.tp")

    def find(_: View) -> Iterator[RuleViolation]:
        yield RuleViolation(rule="r", key="mesh.tp", message="", suggestions=(unknown, 7))

    (problem,) = find_problems(view_of(tp=1), (find,))
    assert problem.suggestions == ("7",)


def test_a_setting_has_no_effect_unless_it_is_the_default_or_allowed() -> None:
    def find(view: View) -> Iterator[RuleViolation]:
        yield from setting_without_effect(view, "mesh.tp", "nothing is cut", allowed=(2,))

    assert find_problems(view_of(tp=1), (find,)) == find_problems(view_of(tp=2), (find,)) == []
    (problem,) = find_problems(view_of(tp=3), (find,))
    assert problem.message == "mesh.tp = 3 changes nothing: nothing is cut"
    assert (problem.rule, problem.suggestions) == ("no-effect", ("mesh.tp = 1",))
