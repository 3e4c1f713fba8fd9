"""The page's glossary has every word of the handbook, and every choice that a run can make."""

from __future__ import annotations

import pytest

from echelon.core.choices.strategies import STRATEGIES
from echelon.handbook.glossary import field_words
from echelon.page.lessons.guides.words import all_words, glossary, idle_causes
from echelon.schedule.build import SCHEDULES
from echelon.telemetry.bubble import IdleCause


@pytest.mark.system("S60")
def test_every_word_and_every_choice_has_its_row() -> None:
    lesson = glossary()
    rows = {row[0]: row for scene in lesson.scenes if scene.table for row in scene.table.rows}
    for word, meaning in field_words().items():
        assert rows[word] == (word, meaning)
    assert {*SCHEDULES, *STRATEGIES} <= set(rows)
    assert set(idle_causes()) == {cause.value for cause in IdleCause} <= set(rows)


def test_there_is_a_table_for_each_kind_of_word() -> None:
    lesson = glossary()
    assert lesson.controls[0].values == tuple(table.title for table in all_words())
    assert len(set(lesson.controls[0].values)) == 6
