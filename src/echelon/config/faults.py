"""A fault: a rule that settings break, and changes that may mend it, not yet tried.

What finds faults only reads settings, so that a suggestion can be tried by finding them again:
`config/tried.py` tells those changes that do work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from echelon.config.kinds import toml_text
from echelon.config.schema import SETTINGS
from echelon.config.view import View
from echelon.core.rulebook.config import NO_EFFECT
from echelon.core.rules import Rule, nearest_divisors

Changes = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Say that `key` breaks `rule`: the arithmetic, what else has a part in it, what may mend it.

    `ways` are kinds of changes, each from the nearest on: of each the first that work are told.
    """

    rule: Rule
    key: str
    message: str
    others: tuple[str, ...] = ()
    ways: Sequence[Iterable[Changes]] = ()


Find = Callable[[View], Iterator[Fault]]


def idle(
    view: View, key: str, because: str, *ways: Changes, fine: tuple[object, ...] = ()
) -> Iterator[Fault]:
    """Yield the fault of a setting without effect, unless it has its default or is `fine`."""
    entry, default = view.entry(key), SETTINGS[key].default
    if entry.value not in (default, *fine):
        yield Fault(
            rule=NO_EFFECT,
            key=key,
            message=f"{key} = {toml_text(entry.value)} changes nothing: {because}",
            ways=(*([way] for way in ways), [{key: default}]),
        )


def by_distance(numbers: Iterable[int], wanted: int) -> list[int]:
    """Return other numbers, those nearest to `wanted` first."""
    return sorted((n for n in numbers if n != wanted), key=lambda n: (abs(n - wanted), n))


def near_divisors(number: int, wanted: int) -> list[int]:
    """Return all divisors of `number` but `wanted`, the nearest to it first."""
    return by_distance(nearest_divisors(number, wanted, limit=number), wanted)


def each(key: str, values: Iterable[object]) -> Iterator[Changes]:
    """Yield the change of one setting to each of these values."""
    return ({key: value} for value in values)
