# SPDX-License-Identifier: Apache-2.0
"""Read a foreign file for all that it gives: a refused key is taken out, and the rest read again.

So what the other keys mean does not depend on it: it is as if the file did not have the key. A key
that --allow names is dropped; any other is refused, and said so.

Other tools accept a ZeRO stage on one rank, which shards nothing. In Echelon a setting without
effect is an error: the stage becomes 0, and settings of slices get their defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from echelon.config.entries import Entry
from echelon.config.job import Job
from echelon.config.load import resolve
from echelon.config.schema import SETTINGS
from echelon.config.setting_layers import SettingLayers
from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.config import NO_EFFECT
from echelon.core.rulebook.interop import IMPORT_ALLOW
from echelon.core.rulebook.zero import ZERO_SHARES_OUT
from echelon.core.rules import did_you_mean
from echelon.interop.key_reader import KeyOutcome, KeyReader, Refusal, json_text

ALL = "all"
"""What --allow takes for every key."""

STAGE = "zero.stage"
MOST_SETTINGS = 8  # that one rank makes moot


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Hold what a file gives: settings, what became of each key, and the problems of those refused.

    `first` are the problems of all keys, before any was taken out.
    """

    entries: Mapping[str, Entry]
    rows: tuple[KeyOutcome, ...]
    assumptions: tuple[str, ...]
    refused: tuple[Problem, ...]
    first: tuple[Problem, ...]


def read_leniently(
    make_reader: Callable[[Mapping[str, object]], KeyReader],
    given: Mapping[str, object],
    allow: Iterable[str],
) -> Reading:
    """Return what the keys of a file give, as `make_reader` reads them, without those refused."""
    names = tuple(allow)

    def allowed(key: str) -> bool:
        return ALL in names or _bare(key) in map(_bare, names)

    reader = make_reader(given)
    first, normal = tuple(reader.problems), reader.given
    rows: list[KeyOutcome] = []
    refused: list[Problem] = []
    out: set[str] = set()
    while True:
        taken = _taken_out(reader, allowed)
        for refusal in reader.refusals:
            keys = [key for key in refusal.keys if key in taken] or refusal.keys
            if out and _follows(refusal, reader, out):
                rows.extend(_following(reader.given, key) for key in keys if key in reader.given)
                continue
            rows.extend(_row(reader, key, refusal, allowed) for key in keys)
            if not all(map(allowed, keys)):
                refused.append(refusal.problem)
        if not taken:
            break
        out |= taken
        reader = make_reader({key: value for key, value in reader.given.items() if key not in out})
    return Reading(
        entries=reader.entries,
        rows=(*reader.rows, *_each_once([*rows, *_of_others(normal, [*reader.rows, *rows])])),
        assumptions=tuple(dict.fromkeys(reader.assumptions)),
        refused=tuple(dict.fromkeys(refused)),
        first=first,
    )


def unneeded_allowances(
    allow: Iterable[str], rows: Iterable[KeyOutcome], path: str
) -> list[Problem]:
    """Return a problem for each --allow that names no key which is refused."""
    named = [_bare(row.key) for row in rows if row.rule]
    return [
        IMPORT_ALLOW.problem(
            f"--allow {key}: no key of this name is refused in {path}",
            key="--allow",
            set_by=f"--allow {key}",
            suggestions=[f"--allow {name}" for name in did_you_mean(_bare(key), named)]
            or [f"no --allow {key}"],
        )
        for key in allow
        if key != ALL and _bare(key) not in named
    ]


def _bare(key: str) -> str:
    """Return a flag without its dashes, so that --allow takes it as a word."""
    return key.lstrip("-")


def _taken_out(reader: KeyReader, allowed: Callable[[str], bool]) -> set[str]:
    """Return the keys to read without: of a refusal those that are allowed, else all of them."""
    taken: set[str] = set()
    for refusal in reader.refusals:
        given = [key for key in refusal.keys if key in reader.given]
        taken.update([key for key in given if allowed(key)] or given)
    return taken


def _follows(refusal: Refusal, reader: KeyReader, out: set[str]) -> bool:
    """Return whether a refusal is only there because of a key that was taken out.

    It is about a key that the file does not have any more, or about others of its table.
    """
    tables = tuple(f"{key.rpartition('.')[0]}." for key in out if "." in key)
    return all(key not in reader.given or key.startswith(tables) for key in refusal.keys)


def _following(given: Mapping[str, object], key: str) -> KeyOutcome:
    why = "it goes with a key that is not taken"
    return KeyOutcome(key=key, given=json_text(given[key]), why=why)


def _of_others(given: Mapping[str, object], rows: Iterable[KeyOutcome]) -> Iterable[KeyOutcome]:
    """Return a row for each key that nothing else was said of: a refused key would have used it."""
    told = {row.key for row in rows}
    return (_following(given, key) for key in given if key not in told)


def _row(
    reader: KeyReader, key: str, refusal: Refusal, allowed: Callable[[str], bool]
) -> KeyOutcome:
    problem = refusal.problem
    given = json_text(reader.given[key]) if key in reader.given else ""
    return KeyOutcome(
        key=key, given=given, why=problem.message, rule=problem.rule, allowed=allowed(key)
    )


def _each_once(rows: Iterable[KeyOutcome]) -> Iterable[KeyOutcome]:
    """Return one row for each key, with the reasons of all its refusals."""
    found: dict[str, KeyOutcome] = {}
    for row in rows:
        before = found.get(row.key)
        if before is None:
            found[row.key] = row
        elif row.why not in before.why:
            found[row.key] = replace(before, why=f"{before.why}; {row.why}")
    return found.values()


def resolve_import(
    gathered: SettingLayers, taken: Mapping[str, Entry], rows: Sequence[KeyOutcome], name: str
) -> tuple[Job | ConfigError, dict[str, Entry], tuple[KeyOutcome, ...]]:
    """Return the run or its error, with the settings and rows that fit one rank.

    `taken` are the settings of the file itself; no other setting is changed.
    """
    taken, rows = dict(taken), tuple(rows)
    outcome = _resolve(gathered, name)
    for _ in range(MOST_SETTINGS):
        problem = _moot(outcome, taken)
        if problem is None:
            break
        key, entry = problem.key, taken[problem.key]
        if key == STAGE:
            why = f"stage {entry.value} of one rank shares nothing"
            stage = 1 if f"{STAGE} = 1" in problem.suggestions else 0
            taken[key] = replace(entry, value=stage)
        else:
            why = "one rank has no slices"
            taken[key] = replace(entry, value=SETTINGS[key].default)
        gathered.add({key: taken[key]})
        rows = tuple(
            replace(row, value=taken[key].value, why=why) if row.setting == key else row
            for row in rows
        )
        outcome = _resolve(gathered, name)
    return outcome, taken, rows


def _resolve(gathered: SettingLayers, name: str) -> Job | ConfigError:
    try:
        return resolve(gathered, name, None)
    except ConfigError as error:
        return error


def _moot(outcome: Job | ConfigError, taken: Mapping[str, Entry]) -> Problem | None:
    """Return the problem of a ZeRO setting of the file that has no effect on one rank."""
    if isinstance(outcome, Job):
        return None
    on_one_rank = taken.get(STAGE, Entry(value=0, source="")).value == 0
    for problem in outcome.problems:
        shares = problem.rule == ZERO_SHARES_OUT.id
        lost = problem.rule == NO_EFFECT.id and on_one_rank and problem.key.startswith("zero.")
        if problem.key in taken and (shares or lost):
            return problem
    return None
