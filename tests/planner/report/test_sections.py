"""Sections of a plan: its page has the tables of its text, and each of them once."""

from __future__ import annotations

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.planner.predict.estimate import estimate_plan
from echelon.planner.report.report import plan_text
from echelon.planner.report.sections import (
    held_sections,
    message_sections,
    note_sections,
    run_sections,
    step_section,
)
from echelon.planner.view.document import DataTable, Section, WaterfallFigure

SPLIT = ("mesh.pp=2", "mesh.dp_shard=2", "mesh.tp=2", "zero.stage=1")


def sections_of(plan: Plan) -> dict[str, Section]:
    estimate = estimate_plan(plan)
    sections = [*run_sections(plan), *held_sections(plan, estimate), step_section(estimate)]
    sections += [*message_sections(plan), *note_sections(plan)]
    assert len({section.id for section in sections}) == len(sections)
    return {section.id: section for section in sections}


def table_of(section: Section) -> DataTable:
    assert section.table is not None
    return section.table


def test_what_the_text_says_is_in_the_sections() -> None:
    plan = load_job("nano", SPLIT).plan
    sections, text = sections_of(plan), " ".join(plan_text(plan, columns=400).split())
    for name in ("held", "step-bytes", "zero-choices", "messages"):
        assert " ".join(sections[name].summary.split()) in text
        for row in table_of(sections[name]).rows:
            assert " ".join(" ".join(row).split()) in text
    for word, fact in table_of(sections["run"]).rows:
        assert " ".join(f"{word} {fact}".split()) in text


def test_terms_have_bands_and_add_up_to_the_figure() -> None:
    plan = load_job("nano", SPLIT).plan
    sections = sections_of(plan)
    figure = sections["step"].figure
    assert isinstance(figure, WaterfallFigure)
    assert table_of(sections["step"]).head == ("term", "seconds", "band", "of the step")
    assert (
        len(table_of(sections["step"]).rows)
        == sum(len(row.parts) for row in figure.rows)
        + (len(figure.others) - len(figure.rows[-1].parts) if figure.others else 0)
        + 1
    )
    assert table_of(sections["memory-terms"]).rows[-1][0] == "sum (memory)"


def test_one_rank_sends_nothing() -> None:
    assert not {"mesh", "sent", "messages"} & sections_of(load_job("nano").plan).keys()
