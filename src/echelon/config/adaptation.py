# SPDX-License-Identifier: Apache-2.0
"""Values of a run preset that give way to what the user wrote.

A run preset (`nano`) is a starting point: its batch, warm-up and checkpoints fit each other, not
every mesh or length that a user asks for. Where a rule is broken, the preset's setting takes the
smallest change that mends it. What the user wrote, the model and the cluster are never changed, and
each change has its origin in the Job: ``adapted to train.steps = 3 (preset nano: 20)``.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count, islice
from math import log2
from typing import cast

from echelon.config.entries import DEFAULT, Entry
from echelon.config.rules.violations import (
    MOST_NAMED,
    BrokenRule,
    RuleViolation,
    SettingChanges,
    ViolationFinder,
    changed_view,
    find_violations,
)
from echelon.config.schema import SETTINGS
from echelon.config.view import View
from echelon.core.settings.value_types import toml_text

ADAPTED = "adapted to "
"""Beginning of the origin of a value that gave way."""

MOST_SUGGESTED = 8  # changes of one list
MOST_TRIED = 160  # sets of changes, for one broken rule
NOT_NUMBER = 8.0  # doublings that another word counts as
MATHEMATICS = 64.0  # doublings that a change of the mathematics counts as, plus its own
KEEPS_MATHEMATICS = (
    *("mesh.", "pipeline.", "zero.", "recompute.", "kernels."),
    *("checkpoint.", "observe."),
)
KEEPS_MATHEMATICS_KEYS = frozenset(
    ("batch.microbatch_sequences", "train.validate_every", "train.validation_batches")
)
"""Settings of the layout or the files of a run, not of its mathematics: changed first."""


def adapted_view(view: View, finders: Sequence[ViolationFinder]) -> View:
    """Return the settings with preset values adapted, as far as that mends broken rules."""
    if not any(entry.gives_way for entry in view.entries.values()):
        return view
    unmended: set[BrokenRule] = set()
    while True:
        # The rule of the number of ranks is last in order, and first here: batches follow ranks.
        violations = [*find_violations(view, finders)][::-1]
        violation = next((one for one in violations if one.broken_rule not in unmended), None)
        if violation is None:
            return view
        change = _smallest_change(view, finders, violation.broken_rule)
        if change is None:
            unmended.add(violation.broken_rule)
        else:
            view = _with_origin(view, change, violation)


def _smallest_change(
    view: View, finders: Sequence[ViolationFinder], mended: BrokenRule
) -> SettingChanges | None:
    """Return the smallest changes of preset values that mend a rule and break none.

    Sets of changes are tried in the order of their size (uniform-cost search). A set grows by one
    change, which a rule suggests that the set breaks.
    """

    def broken_rules(changed: View) -> Counter[BrokenRule]:
        return Counter(one.broken_rule for one in find_violations(changed, finders))

    before = broken_rules(view)
    order = count()
    queue: list[tuple[float, int, dict[str, object]]] = [(0.0, next(order), {})]
    known = {""}
    for _ in range(MOST_TRIED):
        if not queue:
            return None
        _, _, change = heappop(queue)
        changed = changed_view(view, change)
        violations = list(find_violations(changed, finders))
        after = Counter(one.broken_rule for one in violations)
        if change and after < before and after[mended] < before[mended]:
            return change
        for violation in violations:
            if violation.broken_rule != mended and violation.broken_rule in before:
                continue  # It is mended by itself, before or after this.
            for more in _changes(changed, violation, view):
                grown = {**change, **more}
                name = repr(sorted(grown.items(), key=str))
                if name not in known and set(more).isdisjoint(change):
                    known.add(name)
                    heappush(queue, (_distance(view, grown), next(order), grown))
    return None


def _settings_of(violation: RuleViolation) -> tuple[str, ...]:
    return tuple(dict.fromkeys((violation.key, *violation.set_by)))


def _gives_way(view: View, change: SettingChanges) -> bool:
    return bool(change) and all(
        key in view.entries and view.entries[key].gives_way for key in change
    )


def _written_by_user(view: View, violation: RuleViolation) -> tuple[str, ...]:
    """Return the settings of a violation that the user wrote."""
    return tuple(
        key
        for key in _settings_of(violation)
        if key in view.entries and _is_written(view.entries[key])
    )


def _is_written(entry: Entry) -> bool:
    """True if the user wrote a value."""
    ours = entry.source in ("", DEFAULT) or entry.source.startswith(("preset ", "derived"))
    return not (entry.gives_way or ours)


def _changes(view: View, violation: RuleViolation, given: View) -> Iterator[SettingChanges]:
    """Yield changes of values that presets have `given`: of suggestions, defaults, smaller degrees.

    `view` has the changes that were made before.
    """
    if any(
        key in given.entries and not given.entries[key].source for key in _settings_of(violation)
    ):
        return  # A search has chosen one of them, and makes another choice.
    for change in _suggested(violation):
        moved = {
            key: value
            for key, value in change.items()
            if key not in view.entries or view.entries[key].value != value
        }
        if _gives_way(given, moved):
            yield moved
    for key in _settings_of(violation):
        if _gives_way(given, {key: None}):
            yield from ({key: value} for value in _simpler(key, given.entries[key].value))


def _suggested(violation: RuleViolation) -> Iterator[SettingChanges]:
    """Yield the changes that a rule suggests, of lists the first few; untried."""
    for way in violation.suggestions:
        if isinstance(way, str | int):
            yield _read_change(str(way), violation.key)
        elif isinstance(way, Mapping):
            yield cast(SettingChanges, way)
        elif not callable(way):
            yield from islice(way, MOST_SUGGESTED)


def _simpler(key: str, value: object) -> Iterator[object]:
    """Yield the default of a setting, and of a degree or count all halves on the way there."""
    default = SETTINGS[key].default
    if default is not None and default != value:
        yield default
    if key.startswith("mesh.") and isinstance(value, int):
        while value > 2:
            value //= 2
            yield value


def _read_change(text: str, key: str) -> SettingChanges:
    """Return the change that a suggestion states: ``a.b = 1 with c = 2``, or ``2``; else none."""
    table = key.rpartition(".")[0]
    if text.isdigit():
        return {key: int(text)}
    change: dict[str, object] = {}
    for part in text.split(" with "):
        name, equals, value = part.partition(" = ")
        named = name if "." in name else f"{table}.{name}"
        if not equals or named not in SETTINGS:
            return {}
        try:
            change[named] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            return {}
    return change


def _distance(view: View, change: SettingChanges) -> float:
    """Size of a change in doublings; a change of the mathematics counts as far more."""
    return sum(
        _doublings(view.entries[key].value, new) + (0.0 if _keeps_mathematics(key) else MATHEMATICS)
        for key, new in change.items()
    )


def _keeps_mathematics(key: str) -> bool:
    return key.startswith(KEEPS_MATHEMATICS) or key in KEEPS_MATHEMATICS_KEYS


def _doublings(old: object, new: object) -> float:
    if isinstance(old, int | float) and isinstance(new, int | float) and old > 0 and new >= 0:
        return abs(log2(max(new, old / 2**NOT_NUMBER / 4) / old))
    return NOT_NUMBER


def _all_written(view: View) -> str:
    """Settings that the user wrote, as text, for a rule that names a value alone."""
    written = [
        f"{key} = {toml_text(entry.value)}"
        for key, entry in view.entries.items()
        if _is_written(entry)
    ]
    return ", ".join(written) if len(written) <= MOST_NAMED else "the run's other settings"


def _with_origin(view: View, change: SettingChanges, violation: RuleViolation) -> View:
    reasons = ", ".join(
        f"{key} = {toml_text(view.entries[key].value)}" for key in _written_by_user(view, violation)
    )
    reasons = reasons or _all_written(view)
    entries = dict(view.entries)
    for key, value in change.items():
        before = re.sub(rf"\A{ADAPTED}.*\((.*)\)\Z", r"\1", entries[key].source)
        if before == entries[key].source:
            before = f"{before}: {toml_text(entries[key].value)}"
        source = f"{ADAPTED}{reasons} ({before})"
        entries[key] = replace(entries[key], value=value, source=source)
    return replace(view, entries=entries)
