"""The words of the field: each means something, none stands twice, and every choice has a row."""

from __future__ import annotations

from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.choices.strategies import STRATEGIES
from echelon.handbook.glossary import field_words, glossary_tables
from echelon.schedule.build import SCHEDULES


def test_each_word_has_one_meaning() -> None:
    lowered = [word.lower() for word in field_words()]
    assert len(set(lowered)) == len(lowered)
    assert all(field_words().values())


def test_tables_have_a_row_for_each_record() -> None:
    words, schedules, kinds, optimizers, strategies = glossary_tables()
    assert len(words.rows) == len(field_words())
    assert [row[0] for row in schedules.rows] == list(SCHEDULES)
    assert [row[0] for row in kinds.rows] == list(CONTEXT_KINDS)
    assert [row[0] for row in optimizers.rows] == [one.title for one in OPTIMIZERS.values()]
    assert [row[0] for row in strategies.rows] == list(STRATEGIES)
    for table in (words, schedules, kinds, optimizers, strategies):
        assert all(len(row) == len(table.head) and all(row) for row in table.rows)
