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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import log2

from echelon.config.entries import DEFAULT
from echelon.config.rules.suggestions import BrokenRule, SettingChanges, Trial
from echelon.config.rules.violations import RuleViolation, ViolationFinder, find_violations
from echelon.config.settings.schema import SETTINGS
from echelon.config.settings.value_types import toml_text
from echelon.config.view import View

ADAPTED = "adapted to "
"""Beginning of the origin of a value that gave way."""

MOST_CHANGES = 8  # of one run
OTHER_WORD = 8.0  # doublings that another word counts as
KEEPS_MATHEMATICS = (
    *("mesh.", "pipeline.", "zero.", "recompute.", "kernels."),
    *("checkpoint.", "observe."),
)
KEEPS_MATHEMATICS_KEYS = frozenset(
    ("batch.microbatch_sequences", "train.validate_every", "train.validation_batches")
)
"""Settings that change the layout or the files of a run, never what is computed: changed first."""


def adapted_view(view: View, finders: Sequence[ViolationFinder]) -> View:
    """Return the settings with preset values adapted, as far as that mends broken rules."""

    def broken_rules(changed: View) -> Counter[BrokenRule]:
        return Counter(one.broken_rule for one in find_violations(changed, finders))

    for _ in range(MOST_CHANGES):
        if not any(entry.gives_way for entry in view.entries.values()):
            return view
        violations = list(find_violations(view, finders))
        before = Counter(one.broken_rule for one in violations)
        for violation in violations:
            trial = Trial(
                view=view, broken_rules=broken_rules, before=before, mended=violation.broken_rule
            )
            if change := _smallest_change(trial, violation):
                view = _with_origin(view, change, violation)
                break
        else:
            return view
    return view


def _smallest_change(trial: Trial, violation: RuleViolation) -> SettingChanges | None:
    """Return the working change of preset values that alters least; None without one."""
    entries = trial.view.entries
    if any(key in entries and not entries[key].source for key in _settings_of(violation)):
        return None  # A search has chosen one of them, and makes another choice.
    changes = [change for change in _changes(trial, violation) if _gives_way(trial.view, change)]
    distances = {at: _distance(trial.view, change) for at, change in enumerate(changes)}
    nearest = sorted(distances, key=lambda at: distances[at])
    return next((changes[at] for at in nearest if trial.works(changes[at])), None)


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
        if (entry := view.entries.get(key)) is not None
        and not entry.gives_way
        and entry.source not in ("", DEFAULT)
        and not entry.source.startswith(("preset ", "derived"))
    )


def _changes(trial: Trial, violation: RuleViolation) -> Iterator[SettingChanges]:
    """Yield what the error would suggest, and the default of each preset value in it."""
    view = trial.view
    for text in trial.suggestions(violation.suggestions):
        change = _read_change(text, violation.key)
        yield {
            key: value
            for key, value in change.items()
            if key not in view.entries or view.entries[key].value != value
        }
    for key in _settings_of(violation):
        if key in view.entries and SETTINGS[key].default is not None:
            yield {key: SETTINGS[key].default}


def _read_change(text: str, key: str) -> SettingChanges:
    """Return the change that a suggestion is: ``a.b = 1 with c = 2``; nothing for other words."""
    table = key.rpartition(".")[0]
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


def _distance(view: View, change: SettingChanges) -> tuple[bool, float]:
    """Return whether a change alters the mathematics, and how far it goes, in doublings."""
    alters = any(
        not key.startswith(KEEPS_MATHEMATICS) and key not in KEEPS_MATHEMATICS_KEYS
        for key in change
    )
    return alters, sum(_doublings(view.entries[key].value, new) for key, new in change.items())


def _doublings(old: object, new: object) -> float:
    if isinstance(old, int | float) and isinstance(new, int | float) and old > 0 and new > 0:
        return abs(log2(new / old))
    return OTHER_WORD


def _with_origin(view: View, change: SettingChanges, violation: RuleViolation) -> View:
    reasons = ", ".join(
        f"{key} = {toml_text(view.entries[key].value)}" for key in _written_by_user(view, violation)
    )
    reasons = reasons or "the other settings"
    entries = dict(view.entries)
    for key, value in change.items():
        before = re.sub(rf"\A{ADAPTED}.*\((.*)\)\Z", r"\1", entries[key].source)
        if before == entries[key].source:
            before = f"{before}: {toml_text(entries[key].value)}"
        source = f"{ADAPTED}{reasons} ({before})"
        entries[key] = replace(entries[key], value=value, source=source)
    return replace(view, entries=entries)
