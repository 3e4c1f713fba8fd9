# SPDX-License-Identifier: Apache-2.0
"""The words of the field as they are used here: in a file, and as records of choices say them.

A schedule, a way of context parallelism, an optimizer or a strategy that is added to the code has a
row from then on. The page of words, the page's glossary and a test read these tables.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from inspect import cleandoc

from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.choices.strategies import STRATEGIES
from echelon.schedule.build import SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class GlossaryTable:
    """Hold words of one kind: what they are, where a run names one, and a row for each."""

    title: str
    setting: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@lru_cache(maxsize=1)
def field_words() -> Mapping[str, str]:
    """Return the words that no record explains, and what each means."""
    text = files("echelon.handbook").joinpath("glossary.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def glossary_tables() -> tuple[GlossaryTable, ...]:
    """Return the tables: words of the field first, then the choices that records are."""
    words = sorted(field_words().items(), key=lambda row: row[0].lower())
    return (
        GlossaryTable(title="Words", setting="", head=("word", "meaning"), rows=tuple(words)),
        GlossaryTable(
            title="Schedules of a pipeline",
            setting="pipeline.schedule",
            head=("schedule", "what it is"),
            rows=tuple((name, _first(one)) for name, one in SCHEDULES.items()),
        ),
        GlossaryTable(
            title="Ways of context parallelism",
            setting="context.kind",
            head=("kind", "splits", "when", "from"),
            rows=tuple(
                (name, one.facts.splits, one.facts.when, one.facts.source)
                for name, one in CONTEXT_KINDS.items()
            ),
        ),
        GlossaryTable(
            title="Optimizers",
            setting="optimizer.kind",
            head=("optimizer", "keeps for each weight", "from"),
            rows=tuple((one.title, ", ".join(one.state), one.paper) for one in OPTIMIZERS.values()),
        ),
        GlossaryTable(
            title="Strategies",
            setting="echelon compare RUN --strategies",
            head=("strategy", "splits"),
            rows=tuple((one.name, one.about) for one in STRATEGIES.values()),
        ),
    )


def _first(builder: type) -> str:
    line = cleandoc(builder.__doc__ or "").splitlines()[0]
    return line.removeprefix("Build ").removeprefix("the ")
