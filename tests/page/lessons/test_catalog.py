"""All lessons: every figure of the published guides is there, and each lesson is whole."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict
from itertools import pairwise

import pytest

from echelon.cli.main import main
from echelon.handbook.errata.claims import all_claims
from echelon.page.lessons.catalog import lesson_book
from echelon.page.lessons.lesson import DiagramFigure, Frame, Lesson, Tile, TreeFigure

LESSONS = lesson_book().lessons
FIGURES = {f"M{number}" for number in range(1, 26)} - {"M11"} | {"E20", "F11"}
"""The figures of published guides that explain; M11 is a title picture."""

MOST_BYTES = 100_000
"""A page is sent by mail: what one lesson may take of it."""


@pytest.mark.system("S58", "E20", "F11")
def test_every_figure_of_the_guides_is_a_lesson() -> None:
    shown = {row for lesson in LESSONS for row in lesson.rows}
    assert sorted(FIGURES - shown) == []
    assert sorted(shown - FIGURES) == []


def test_each_lesson_has_a_name_of_its_own_that_an_address_can_hold() -> None:
    names = [lesson.id for lesson in LESSONS]
    assert len(set(names)) == len(names)
    assert [name for name in names if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)] == []
    taken = {"lesson", "step"}
    for lesson in LESSONS:
        controls = [control.name for control in lesson.controls]
        assert len(set(controls)) == len(controls)
        assert not taken & set(controls)


def test_topics_stand_together() -> None:
    topics = [lesson.topic for lesson in LESSONS]
    runs = [topic for at, topic in enumerate(topics) if at == 0 or topics[at - 1] != topic]
    assert len(runs) == len(set(runs))


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda one: one.id)
def test_a_lesson_says_and_shows_something_at_each_step(lesson: Lesson) -> None:
    assert lesson.title
    assert lesson.summary.endswith(".")
    assert lesson.source
    for scene in lesson.scenes:
        assert scene.frames
        for frame in scene.frames:
            assert frame.caption.endswith((".", "?"))
            assert frame.figures or scene.table
            assert all(fact.name and fact.value for fact in frame.facts)
            told = [fact.name for fact in frame.facts]
            assert len(set(told)) == len(told)
        if scene.table:
            assert all(len(row) == len(scene.table.head) for row in scene.table.rows)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda one: one.id)
def test_a_copy_comes_from_a_tile_of_the_frame_before(lesson: Lesson) -> None:
    for scene in lesson.scenes:
        for before, frame in pairwise(scene.frames):
            earlier = {tile.id for tile in tiles_of(before)}
            # What was there before glides from its own place where its origin is not shown.
            new = [one for one in tiles_of(frame) if one.origin and one.id not in earlier]
            assert {one.origin for one in new} <= earlier


def tiles_of(frame: Frame) -> list[Tile]:
    figures = (one for one in frame.figures if isinstance(one, DiagramFigure))
    return [tile for one in figures for place in one.places for tile in place.tiles]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda one: one.id)
def test_what_a_diagram_names_is_there(lesson: Lesson) -> None:
    for frame in (frame for scene in lesson.scenes for frame in scene.frames):
        for figure in frame.figures:
            if isinstance(figure, DiagramFigure):
                tiles = [tile for place in figure.places for tile in place.tiles]
                names = [tile.id for tile in tiles]
                assert len(set(names)) == len(names)
                assert all(0 <= tile.kind < len(figure.kinds) for tile in tiles)
                for move in figure.moves:
                    assert move.words
                    assert {move.source, move.target} <= set(names)
                for place in figure.places:
                    cells = [cell for tile in place.tiles for cell in covered(asdict(tile))]
                    assert len(set(cells)) == len(cells), "no tile lies on another"
            if isinstance(figure, TreeFigure):
                nodes = [node.id for node in figure.nodes]
                assert len(set(nodes)) == len(nodes)
                led_to = [one.node for node in figure.nodes for one in node.branches]
                assert sorted([figure.nodes[0].id, *led_to]) == sorted(nodes)


def covered(tile: dict[str, int]) -> list[tuple[int, int]]:
    rows = range(tile["row"], tile["row"] + tile["rows"])
    columns = range(tile["column"], tile["column"] + tile["columns"])
    return [(row, column) for row in rows for column in columns]


def test_lessons_name_claims_of_the_errata() -> None:
    known = {claim.id for claim in all_claims()}
    named = {one.id for lesson in LESSONS for one in lesson.corrections}
    assert named <= known
    assert len(named) > 20


def test_no_lesson_makes_the_page_large() -> None:
    sizes = {one.id: len(json.dumps(asdict(one), separators=(",", ":"))) for one in LESSONS}
    assert {name: size for name, size in sizes.items() if size > MOST_BYTES} == {}


def test_the_text_of_lessons_is_plain() -> None:
    text = json.dumps([asdict(one) for one in LESSONS])
    assert text.isascii()
    assert re.findall(r"\b[Ss]eeds?\b", text) == []
    assert "NaN" not in text
    assert "Infinity" not in text


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted({one for lesson in LESSONS for one in lesson.commands}))
def test_a_command_of_a_lesson_runs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *words = shlex.split(command)
    assert program == "echelon"
    assert main(words) == 0
    assert capsys.readouterr().out
