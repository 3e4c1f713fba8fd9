# SPDX-License-Identifier: Apache-2.0
"""What an error suggests: changes of settings, each tried before it is told.

A change is tried by finding the broken rules again in a changed View. It works where it mends what
the error is about and breaks nothing else; what mends another fault only is no advice about this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import cast

from echelon.config.entries import Entry
from echelon.config.settings.value_types import toml_text
from echelon.config.view import Unavailable, View
from echelon.core.rules import nearest_divisors

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
