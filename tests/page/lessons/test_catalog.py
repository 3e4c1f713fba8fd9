"""Every lesson: what its figures refer to is there, its rows are known, and it is not large."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise

import pytest

from echelon.cli.main import main
from echelon.page.lessons.catalog import lesson_book
from echelon.page.lessons.lesson import Lesson
from tests.page.lessons.shown import diagrams, tiles

LESSONS = lesson_book().lessons
MOST_BYTES = 100_000
"""Of one lesson as JSON."""


def _lessons() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("lesson", LESSONS, ids=[one.id for one in LESSONS])


def test_lessons_are_listed_once_and_by_topic() -> None:
    ids = [one.id for one in LESSONS]
    assert sorted(set(ids)) == sorted(ids)
    topics = [one.topic for one in LESSONS]
    changes = [one for one, other in pairwise([*topics, ""]) if one != other]
    assert len(changes) == len(set(topics)), "the lessons of a topic stand together"


@_lessons()
def test_tiles_moves_and_origins_are_there(lesson: Lesson) -> None:
    for scene in lesson.scenes:
        for before, frame in zip((None, *scene.frames), scene.frames, strict=False):
            there = tiles(frame)
            earlier = {} if before is None else tiles(before)
            for board in diagrams(frame):
                for move in board.moves:
                    assert {move.source, move.target} <= there.keys(), lesson.id
                    assert move.words
                for place in board.places:
                    assert all(0 <= tile.kind < len(board.kinds) for tile in place.tiles)
            # What was there before glides from its own place where its origin is not shown.
            new = [tile for tile in there.values() if tile.origin and tile.id not in earlier]
            assert before is None or {tile.origin for tile in new} <= earlier.keys(), lesson.id


@_lessons()
def test_what_is_said_is_said_in_sentences(lesson: Lesson) -> None:
    assert lesson.summary.endswith(".")
    for scene in lesson.scenes:
        for frame in scene.frames:
            assert frame.caption.endswith(".")
            assert frame.figures
            names = [one.name for one in frame.facts]
            assert len(names) == len(set(names))


@_lessons()
def test_lessons_are_small(lesson: Lesson) -> None:
    text = json.dumps(asdict(lesson), separators=(",", ":"))
    assert len(text) <= MOST_BYTES


COMMANDS = [one for lesson in LESSONS for one in lesson.commands]


@pytest.mark.parametrize(
    "command",
    [
        # A search takes seconds; a plan of a small model does not.
        pytest.param(one, marks=() if "nano" in one else pytest.mark.slow)
        for one in COMMANDS
    ],
)
def test_commands_of_lessons_make_their_plans(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *tokens = command.split()
    assert name == "echelon"
    assert main(tokens) == 0, capsys.readouterr().err


def test_some_lessons_have_commands() -> None:
    assert any("nano" in one for one in COMMANDS)
