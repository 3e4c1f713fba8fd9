# SPDX-License-Identifier: Apache-2.0
"""The one mechanism of validation: finders read a View and yield the rules that it breaks.

A finder tells the arithmetic, and ways to mend it that are not yet tried: so it is cheap to ask.
A change is tried by finding the broken rules again in a changed View. It works where it mends what
the error is about and breaks nothing else. A finder that cannot judge, because a setting is missing
or wrong, is skipped (see `config/view.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import cast

from echelon.config.entries import Entry
from echelon.config.view import Unavailable, View
from echelon.core.errors import Problem
from echelon.core.messages.plurals import in_singular
from echelon.core.rulebook.config import NO_EFFECT
from echelon.core.rules import Rule, nearest_divisors
from echelon.core.settings.value_types import toml_text


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleViolation:
    """Say that `key` breaks `rule`: the arithmetic, what else has a part in it, what may mend it.

    `set_by` are the settings of which is told where they were set, the key alone where there are
    none; `origin` is that text where something else knows it.
    """

    rule: Rule | str
    key: str
    message: str
    set_by: tuple[str, ...] = ()
    suggestions: Sequence[Way] = ()
    origin: str | None = None

    @classmethod
    def from_problem(
        cls, problem: Problem, *set_by: str, origin: str | None = None
    ) -> RuleViolation:
        """Return what something below settings has found, such as a builder of schedules."""
        return cls(
            rule=problem.rule,
            key=problem.key,
            message=problem.message,
            set_by=set_by,
            suggestions=problem.suggestions,
            origin=origin,
        )

    @property
    def broken_rule(self) -> BrokenRule:
        """Return the id of the rule, and the setting."""
        return self.rule if isinstance(self.rule, str) else self.rule.id, self.key


ViolationFinder = Callable[[View], Iterable[RuleViolation]]


def find_violations(view: View, finders: Iterable[ViolationFinder]) -> Iterator[RuleViolation]:
    """Yield what these finders find, skipping those that cannot judge."""
    for find in finders:
        try:
            yield from find(view)
        except Unavailable:
            continue


def find_problems(
    view: View, finders: Sequence[ViolationFinder], told: Sequence[ViolationFinder] | None = None
) -> list[Problem]:
    """Return what is wrong with settings, each problem with the changes that do mend it.

    Of the finders those `told` find problems; changes are tried with all.
    """

    def broken_rules(changed: View) -> Counter[BrokenRule]:
        return Counter(one.broken_rule for one in find_violations(changed, finders))

    found = list(find_violations(view, finders if told is None else told))
    if not found:
        return []
    before = broken_rules(view)
    problems: list[Problem] = []
    for one in found:
        rule, key = one.broken_rule
        trial = Trial(view=view, broken_rules=broken_rules, before=before, mended=one.broken_rule)
        problem = Problem(
            rule=rule,
            message=in_singular(one.message),
            key=key,
            set_by=view.set_by(*(one.set_by or (key,))) if one.origin is None else one.origin,
            suggestions=tuple(dict.fromkeys(trial.suggestions(one.suggestions))),
        )
        problems.append(problem)
    return problems


def setting_without_effect(
    view: View, key: str, because: str, *ways: Way, allowed: tuple[object, ...] = ()
) -> Iterator[RuleViolation]:
    """Yield that a setting has no effect, unless it has its default or is `allowed`."""
    value = view.entry(key).value
    if value not in (view.default(key), *allowed):
        yield RuleViolation(
            rule=NO_EFFECT,
            key=key,
            message=f"{key} = {toml_text(value)} changes nothing: {because}",
            suggestions=(*ways, *_back_to_default(view, key, ways)),
        )


def settings_excluding(
    view: View, rule: Rule, key: str, other: str, *ways: Way, because: str = ""
) -> RuleViolation:
    """Two settings that do not go together; `because` says why."""
    pair = " with ".join(f"{one} = {toml_text(view.value(one))}" for one in (key, other))
    return RuleViolation(
        rule=rule,
        key=key,
        message=f"{pair}: {because}" if because else pair,
        set_by=(key, other),
        suggestions=ways,
    )


def _back_to_default(view: View, key: str, ways: Sequence[Way]) -> list[str]:
    """Return the default of a setting as a way, where no other way says what must change too."""
    alone = not any(isinstance(way, Mapping) and key in way for way in ways)
    return [f"{key} = {toml_text(view.default(key))}"] if alone else []


MOST_NAMED = 2  # values in a message
MOST_TRIED = 64  # values for one setting

SettingChanges = Mapping[str, object]
BrokenRule = tuple[str, str]
"""A rule that is broken, and the setting that it is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Try changes of `view`, in which `before` is broken, to mend `mended`."""

    view: View
    broken_rules: Callable[[View], Counter[BrokenRule]]
    before: Counter[BrokenRule]
    mended: BrokenRule

    def works(self, change: SettingChanges) -> bool:
        """Return whether a change mends what it should, and breaks nothing."""
        after = self.broken_rules(changed_view(self.view, change))
        return after[self.mended] < self.before[self.mended] and after < self.before

    def is_legal(self, change: SettingChanges) -> bool:
        """Return whether nothing at all is broken after a change."""
        return not self.broken_rules(changed_view(self.view, change))

    def first(self, changes: Iterable[SettingChanges], limit: int = MOST_NAMED) -> list[str]:
        """Return the first changes that work, as they are set."""
        return [change_text(change) for change in islice(filter(self.works, changes), limit)]

    def suggestions(self, ways: Iterable[Way]) -> Iterator[str]:
        """Yield what is told of each way to mend a fault; of one that cannot be judged, nothing."""
        for way in ways:
            if isinstance(way, str | int):
                yield str(way)
                continue
            with suppress(Unavailable):
                if isinstance(way, Mapping):
                    yield from self.first([cast(SettingChanges, way)])
                elif callable(way):
                    yield from way(self)
                else:
                    yield from self.first(islice(way, MOST_TRIED))


Way = str | int | SettingChanges | Iterable[SettingChanges] | Callable[[Trial], Iterable[str]]
"""A way to mend a fault: what is told as it is; a change, or changes from the nearest on, of
which the first that work are told; or what a function makes of trying."""


def changed_view(view: View, change: SettingChanges) -> View:
    """Return the settings after a change."""
    entries = {key: Entry(value=value, source="") for key, value in change.items()}
    return replace(view, entries={**view.entries, **entries})


def setting_changes(key: str, values: Iterable[object]) -> Iterator[SettingChanges]:
    """Yield the change of one setting to each of these values."""
    return ({key: value} for value in values)


def by_distance(numbers: Iterable[int], wanted: int) -> list[int]:
    """Return other numbers, those nearest to `wanted` first."""
    return sorted((n for n in numbers if n != wanted), key=lambda n: (abs(n - wanted), n))


def near_divisors(number: int, wanted: int) -> list[int]:
    """Return all divisors of `number` but `wanted`, the nearest to it first."""
    return by_distance(nearest_divisors(number, wanted, limit=number), wanted)


def change_text(change: SettingChanges) -> str:
    """Return a change as it is set: ``mesh.tp = 2 with mesh.pp = 1``."""
    return " with ".join(f"{key} = {toml_text(value)}" for key, value in change.items())
