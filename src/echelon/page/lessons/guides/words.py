# SPDX-License-Identifier: Apache-2.0
"""The words of the field, as they are used here: a table for each kind of word."""

from __future__ import annotations

import re
from inspect import cleandoc

from echelon.handbook.glossary import GlossaryTable, glossary_tables
from echelon.page.document import Fact
from echelon.page.figures import DataTable
from echelon.page.lessons.lesson import Frame, Lesson, LessonControl, Scene
from echelon.telemetry import bubble


def glossary() -> Lesson:
    """Return the lesson: every word of the glossary."""
    tables = all_words()
    control = LessonControl(
        name="kind", label="kind of word", values=tuple(one.title for one in tables)
    )
    return Lesson(
        id="glossary",
        topic="Reference",
        title="Glossary",
        rows=(),
        summary="The words of this field, each with the one meaning that it has here.",
        source="the glossary of the handbook, and the records of the code that a run can choose",
        controls=(control,),
        scenes=tuple(_scene(one) for one in tables),
    )


def all_words() -> tuple[GlossaryTable, ...]:
    """Return every table of words, the causes of idle time last."""
    causes = idle_causes()
    idle = GlossaryTable(
        title="Why a rank is idle",
        setting="echelon observe RUN --schedule",
        head=("cause", "meaning"),
        rows=tuple(causes.items()),
    )
    return (*glossary_tables(), idle)


def idle_causes() -> dict[str, str]:
    """Return why ranks are idle, as the module that finds it out says."""
    text = cleandoc(bubble.__doc__ or "")
    found: dict[str, str] = {}
    for item in re.findall(r"^- (.*?)(?=^- |\Z)", text, re.MULTILINE | re.DOTALL):
        names, _, meaning = " ".join(item.split()).partition(": ")
        for name in re.findall(r"\*(.+?)\*", names):
            found[name] = meaning
    return found


def _scene(table: GlossaryTable) -> Scene:
    where = f" A run names one by `{table.setting}`." if table.setting else ""
    frame = Frame(
        caption=f"{table.title}.{where}",
        figures=(),
        facts=(Fact(name="rows", value=str(len(table.rows))),),
    )
    return Scene(frames=(frame,), table=DataTable(head=table.head, rows=table.rows))
