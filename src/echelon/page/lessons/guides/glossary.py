# SPDX-License-Identifier: Apache-2.0
"""Words of the field as they are used here, and published claims that are wrong."""

from __future__ import annotations

import re
from inspect import cleandoc

from echelon.handbook.errata.claims import GUIDES, SOURCES, PublishedClaim, Verdict, all_claims
from echelon.handbook.glossary import GlossaryTable, glossary_tables
from echelon.page.lessons.corrections import correction_of
from echelon.page.lessons.lesson import Frame, Lesson, LessonControl, Scene, choices
from echelon.planner.view.document import DataTable, Fact
from echelon.telemetry import bubble

VERDICTS: dict[str, Verdict] = {"is wrong": "wrong", "holds only at times": "ambiguous"}
_TITLES = {
    name: f"{SOURCES[name].title.partition(':')[0]}" if name in SOURCES else "where guides differ"
    for name in GUIDES
}
_CONTROLS = (
    LessonControl(name="verdict", label="what", values=tuple(VERDICTS)),
    LessonControl(name="guide", label="guide", values=tuple(_TITLES[name] for name in GUIDES)),
)


def errata() -> Lesson:
    """Return the lesson: a table of claims for each guide."""
    by_title = {title: name for name, title in _TITLES.items()}
    return Lesson(
        id="errata",
        topic="Reference",
        title="What published guides get wrong",
        rows=(),
        summary=(
            "Three guides to parallel training were read claim by claim. Whatever is wrong stands "
            "here with what holds, and so does what holds only under conditions they do not name."
        ),
        source="the claims of the handbook; what is a number is computed by the formulas",
        controls=_CONTROLS,
        scenes=tuple(
            _scene(VERDICTS[one["verdict"]], by_title[one["guide"]]) for one in choices(_CONTROLS)
        ),
        commands=("echelon explain errata", "echelon explain distributed-07"),
    )


def claims_of(guide: str, verdict: Verdict) -> tuple[PublishedClaim, ...]:
    """Return the claims of a guide with a verdict, in the order of its text."""
    return tuple(one for one in all_claims() if one.guide == guide and one.verdict == verdict)


def _scene(verdict: Verdict, guide: str) -> Scene:
    found = claims_of(guide, verdict)
    every = [one for one in all_claims() if one.guide == guide]
    source = SOURCES.get(guide)
    who = f"{source.title} ({source.author})" if source else "The three guides among themselves"
    what = "are wrong" if verdict == "wrong" else "hold only at times"
    frame = Frame(
        caption=f"{who}: {len(found)} of {len(every)} claims {what}.",
        figures=(),
        facts=(Fact("claims", str(len(found)), f"of {len(every)}"),),
    )
    return Scene(
        frames=(frame,),
        table=DataTable.of(("claim", "where", "it says", "what holds"), map(_row, found)),
    )


def _row(claim: PublishedClaim) -> tuple[str, ...]:
    told = correction_of(claim)
    return claim.id, claim.where, told.said, told.holds


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
        scenes=tuple(_glossary_scene(one) for one in tables),
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


def _glossary_scene(table: GlossaryTable) -> Scene:
    where = f" A run names one by `{table.setting}`." if table.setting else ""
    frame = Frame(
        caption=f"{table.title}.{where}",
        figures=(),
        facts=(Fact("rows", str(len(table.rows))),),
    )
    return Scene(frames=(frame,), table=DataTable.of(table.head, table.rows))
