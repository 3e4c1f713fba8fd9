"""The page's glossary has every word of the handbook, and every choice that a run can make."""

from __future__ import annotations

import pytest

from echelon.core.choices.strategies import STRATEGIES
from echelon.handbook.glossary import field_words
from echelon.page.lessons.guides.glossary import all_words, glossary, idle_causes
from echelon.schedule.build import SCHEDULES
from echelon.telemetry.bubble import IdleCause


@pytest.mark.system("S60")
def test_every_word_and_every_choice_has_its_row() -> None:
    lesson = glossary()
    first, *choices, idle = (scene.table.rows for scene in lesson.scenes if scene.table)
    assert {word: meaning for word, meaning in first} == field_words()
    assert {*SCHEDULES, *STRATEGIES} <= {row[0] for rows in choices for row in rows}
    assert {cause: meaning for cause, meaning in idle} == idle_causes()
    assert set(idle_causes()) == {cause.value for cause in IdleCause}


def test_there_is_a_table_for_each_kind_of_word() -> None:
    lesson = glossary()
    assert lesson.controls[0].values == tuple(table.title for table in all_words())
    assert len(set(lesson.controls[0].values)) == 6
