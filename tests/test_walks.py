"""What `make test` takes of many cases, and what it leaves to `make test-all`."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.walks import left_to_all, shortened


class Case:
    """Stand for a case of a test, as pytest collects it."""

    def __init__(
        self, test: str, values: tuple[str, ...], every: int | None, quick: tuple[str, ...] = ()
    ) -> None:
        whole = "-".join(values)
        self.nodeid = f"{test}[{whole}]"
        self.callspec = SimpleNamespace(_idlist=values, params={}, id=whole)
        self._marks = {} if every is None else {"one_in": pytest.mark.one_in(every).mark}
        if quick:
            self._marks["quick"] = pytest.mark.quick(*quick).mark

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._marks.get(name)


def taken(cases: list[Any]) -> list[Any]:
    """Return the cases that `make test` takes."""
    left = left_to_all(cases)
    return [case for case in cases if case not in left]


def test_of_many_cases_about_every_nth_stays_and_an_added_one_changes_no_other() -> None:
    cases = [Case("a", (str(number),), 4) for number in range(400)]
    kept = taken(cases)
    assert 30 <= len(kept) <= 170
    fewer = taken(cases[:200])
    assert {case.nodeid for case in fewer} - {case.nodeid for case in kept} == set()


def test_of_each_test_one_case_stays_and_without_the_marker_all() -> None:
    for number in range(20):
        assert len(taken([Case(f"t{number}", (str(i),), 10**6) for i in range(3)])) == 1
    assert len(taken([Case("all", (str(i),), None) for i in range(3)])) == 3


@pytest.mark.parametrize("every", [2, 5, 10**6])
def test_each_value_that_cases_share_stays(every: int) -> None:
    models, stages, ends = ("dense", "experts", "latent"), ("0", "1", "2", "3"), ("first", "last")
    cases = [Case("a", values, every) for values in product(models, stages, ends)]
    kept = [case.callspec._idlist for case in taken(cases)]
    for place, values in enumerate((models, stages, ends)):
        assert {case[place] for case in kept} == set(values)
    if every == 10**6:
        assert len(kept) <= 6
    assert kept == [case.callspec._idlist for case in taken(cases)]


def test_of_pairs_in_one_parameter_each_value_stays_too() -> None:
    cases = [Case("a", (f"case{number}",), 10**6) for number in range(4)]
    for case, (stage, kind) in zip(cases, product((1, 2), ("ring", "no")), strict=True):
        case.callspec.params.update(stage=stage, kind=kind, mesh=object())
    kept = [case.callspec.params for case in taken(cases)]
    assert {case["stage"] for case in kept} == {1, 2}
    assert {case["kind"] for case in kept} == {"ring", "no"}


def test_of_names_of_modules_one_of_each_module_stays() -> None:
    names = [
        f"{module}:{number}" for module in ("context", "experts", "slices") for number in "123"
    ]
    kept = taken([Case("a", (name,), 10**6) for name in names])
    assert sorted(case.nodeid.partition(":")[0] for case in kept) == [
        "a[context",
        "a[experts",
        "a[slices",
    ]


def test_cases_that_are_not_quick_are_slow() -> None:
    one, other = shortened([1, (2, "b")], quick=lambda case: case == 1)
    assert one == 1
    assert (other.values, other.marks) == ((2, "b"), (pytest.mark.slow,))


@pytest.mark.parametrize(
    ("quick", "kept"),
    [
        (("ring-2", "gathered-4"), ["ring-2", "gathered-4"]),
        (("2",), ["ring-2", "gathered-2"]),
        (("renamed",), ["ring-2"]),
    ],
)
def test_cases_that_are_named_stay_or_the_first(quick: tuple[str, ...], kept: list[str]) -> None:
    cases = [Case("a", one, None, quick) for one in product(("ring", "gathered"), ("2", "4"))]
    assert [case.callspec.id for case in taken(cases)] == kept
