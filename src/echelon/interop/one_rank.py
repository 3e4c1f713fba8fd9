# SPDX-License-Identifier: Apache-2.0
"""ZeRO settings of another tool on one rank, as in a smoke test of one process.

Other tools accept a ZeRO stage on one rank, which shards nothing. In Echelon a setting without
effect is an error: the stage becomes 0, and settings of slices get their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from echelon.config.entries import Entry
from echelon.config.job import Job
from echelon.config.load import resolve
from echelon.config.setting_layers import SettingLayers
from echelon.config.settings.schema import SETTINGS
from echelon.core.errors import ConfigError, Problem
from echelon.core.rulebook.config import NO_EFFECT
from echelon.core.rulebook.zero import ZERO_SHARES_OUT
from echelon.interop.key_reader import KeyOutcome

STAGE = "zero.stage"
MOST_SETTINGS = 8  # that one rank makes moot


def resolve_import(
    gathered: SettingLayers,
    taken: Mapping[str, Entry],
    rows: Sequence[KeyOutcome],
    name: str,
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
            _told(row, taken[key].value, why) if row.setting == key else row for row in rows
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


def _told(row: KeyOutcome, value: object, why: str) -> KeyOutcome:
    return replace(row, value=value, why=why)
