"""Walks over many cases, of which `make test` takes some and `make test-all` takes all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings

LEAST_EXAMPLES = 6

QUICK_EXAMPLES = 30
"""Examples of which `make test-all` draws a hundred."""


def shortened(cases: Iterable[Any], quick: Callable[[Any], bool]) -> list[Any]:
    """Return parameters of a test: those that are not `quick` belong to `make test-all` only.

    A case that is a tuple gives a value to each of several arguments.
    """
    return [case if quick(case) else _slow(case) for case in cases]


def examples(most: int) -> int:
    """Return how many examples Hypothesis draws: `most` in `make test-all`, fewer in `make test`.

    The profile that is loaded says how many stand for a hundred.
    """
    profile = settings.default
    assert profile is not None
    return max(min(most, LEAST_EXAMPLES), most * profile.max_examples // 100)


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)


def left_to_all(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the cases that `one_in(n)` or `quick(name, ...)` leaves to `make test-all`.

    Of `one_in`, about every n-th case of a test stays, and at least one, chosen by their names
    alone. A test of several parameters keeps more where it has to: each value that its cases share
    stays in one, and of names like "module:name" one of each module. Of `quick`, the cases of these
    names stay, of a test of several parameters each that has one, and the first where none is. What
    is slow anyway is left out of account.
    """
    return [*_left(items, "one_in", _left_of), *_left(items, "quick", _not_quick)]


def _left(
    items: Sequence[pytest.Item],
    marker: str,
    left_of: Callable[[Sequence[pytest.Item]], list[pytest.Item]],
) -> list[pytest.Item]:
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        marked = item.get_closest_marker(marker) is not None
        if marked and item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    return list(chain.from_iterable(left_of(cases) for cases in tests.values()))


def _not_quick(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    marker = cases[0].get_closest_marker("quick")
    assert marker is not None
    quick = set(marker.args)
    left = [case for case in cases if not quick & _names(case)]
    return left if len(left) < len(cases) else left[1:]


def _left_of(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    by_chance = sorted(cases, key=lambda item: crc32(item.nodeid.encode()))
    having: dict[tuple[str, object], list[pytest.Item]] = defaultdict(list)
    for case in by_chance:
        for value in _values(case):
            having[value].append(case)
    missing = {value for value, those in having.items() if len(those) > 1}
    left: list[pytest.Item] = []
    for place, case in enumerate(by_chance):
        marker = case.get_closest_marker("one_in")
        assert marker is not None
        if place and crc32(case.nodeid.encode()) * marker.args[0] >= 2**32:
            left.append(case)
        else:
            missing.difference_update(_values(case))
    while missing:
        # The first of those that have most of what is missing.
        case = max(left, key=lambda one: len(missing.intersection(_values(one))))
        left.remove(case)
        missing.difference_update(_values(case))
    return left


def _values(item: pytest.Item) -> set[tuple[str, object]]:
    """Return the values of a case: those of its parameters, and what pytest names them by."""
    called = getattr(item, "callspec", None)
    if called is None:
        return set()
    names = [(str(place), name) for place, name in enumerate(called._idlist)]
    kinds = [(place, name.partition(":")[0]) for place, name in names if ":" in name]
    plain = (str, int, float)
    values = [(key, value) for key, value in called.params.items() if isinstance(value, plain)]
    return {*names, *kinds, *values}


def _names(item: pytest.Item) -> set[str]:
    """Return what pytest names a case by: the name of each of its parameters, and the whole."""
    called = getattr(item, "callspec", None)
    return set() if called is None else {*called._idlist, called.id}
