# SPDX-License-Identifier: Apache-2.0
"""The page of `echelon explain WORD`: a word of the field, a choice, or a setting.

A word is found by its name, by its abbreviation (TP), or by its name in other tools. Its page has
the meaning that the glossary gives, the settings of that name, and the rules about them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from echelon.config.settings.schema import SETTINGS
from echelon.config.settings.value_types import toml_text
from echelon.core.choices.strategies import STRATEGY_NAMES
from echelon.core.messages.synonyms import SYNONYMS
from echelon.core.rulebook import all_rules
from echelon.handbook.glossary import glossary_tables
from echelon.planner.view.text_layout import wrap_text

MOST_RULES = 12  # on the page of a word


def find_word(name: str, *, columns: int) -> tuple[dict[str, Any], str] | None:
    """Return the page of a word, as JSON values and as text; None for an unknown word."""
    words = _spellings(name)
    meanings = [*_meanings(words)]
    named = [key for key in SETTINGS if _plain(key.rpartition(".")[2]) in words]
    settings = [name] if name in SETTINGS else named
    if not meanings and not settings:
        return None
    names = {word for text, _ in meanings for word in _names(text)} | words
    names.discard("data")  # of data parallel; rules of data are about what is read
    rules = [rule.id for rule in all_rules() if names.intersection(rule.id.split("-"))]
    about = {key: SETTINGS[key].about for key in settings}
    values = {"word": name, "meanings": dict(meanings), "settings": about, "rules": rules}
    return values, _page(meanings, settings, rules, columns)


def _spellings(name: str) -> frozenset[str]:
    """Spellings to compare: the word in lower case, and the words of Echelon with its meaning."""
    plain = _plain(name.rpartition(".")[2] if name in SETTINGS else name)
    strategies = [name.ours for name in STRATEGY_NAMES if _plain(name.name) == plain and name.ours]
    return frozenset(
        (plain, *map(_plain, SYNONYMS.get(name.lower(), ())), *map(_plain, strategies))
    )


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]|parallelism$|parallel$", "", name.lower())


def _names(word: str) -> set[str]:
    """Return the names in a word of the glossary: ``tensor parallel (`tp`)`` is tensor, and tp."""
    full, _, short = word.partition(" (")
    return {_plain(name) for name in (full, *re.findall(r"`([^`]+)`", short))}


def _meanings(words: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield the words of the glossary with one of these names, each with its meaning."""
    for table in glossary_tables():
        for row in table.rows:
            names = _names(row[0])
            if words & names:
                yield row[0], "; ".join(text for text in row[1:] if text)


def _page(
    meanings: list[tuple[str, str]], settings: list[str], rules: list[str], columns: int
) -> str:
    lines: list[str] = []
    for word, meaning in meanings:
        lines += wrap_text(f"{word}: {meaning}", "", "  ", columns=columns)
    for key in settings:
        setting = SETTINGS[key]
        default = "" if setting.default is None else f" (default {toml_text(setting.default)})"
        lines += wrap_text(f"--set {key}=...  {setting.about}{default}", "", "  ", columns=columns)
    if rules:
        lines += wrap_text(f"rules: {', '.join(rules[:MOST_RULES])}", "", "  ", columns=columns)
    return "\n".join(lines) + "\n"
