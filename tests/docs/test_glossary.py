"""The glossary has a row for each word that the code gives users."""

from __future__ import annotations

import re

import pytest

from echelon.core.axis import Axis
from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.choices.strategies import STRATEGIES
from echelon.handbook.glossary import field_words
from echelon.page.lessons.guides.glossary import idle_causes
from echelon.schedule.build import SCHEDULES
from echelon.telemetry.bubble import IdleCause
from tests.docs.reference.glossary import glossary_page

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")


def test_every_axis_and_collective_is_explained() -> None:
    said = " ".join(field_words())
    assert [axis for axis in Axis if f"`{axis.value}`" not in said] == []
    assert [name for name in COLLECTIVES if name not in field_words()] == []


@pytest.mark.system("S60")
def test_every_choice_has_a_row() -> None:
    first = set(re.findall(r"^\| (.*?) \|", glossary_page(), re.MULTILINE))
    titles = [one.title for one in OPTIMIZERS.values()]
    chosen = [*SCHEDULES, *CONTEXT_KINDS, *titles, *STRATEGIES]
    assert [name for name in chosen if name not in first] == []


def test_every_cause_of_idle_time_is_explained() -> None:
    assert set(idle_causes()) == {cause.value for cause in IdleCause}
    assert all(idle_causes().values())


def test_each_meaning_is_said_and_no_word_twice() -> None:
    assert all(field_words().values())
    lowered = [word.lower() for word in field_words()]
    assert len(set(lowered)) == len(lowered)
