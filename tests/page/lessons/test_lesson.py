"""A lesson has a scene for every choice of its controls, in the order of their product."""

from __future__ import annotations

import pytest

from echelon.page.lessons.diagram import DiagramFigure
from echelon.page.lessons.lesson import Frame, Lesson, LessonControl, Scene, choices

CONTROLS = (
    LessonControl(name="ranks", label="ranks", values=("2", "4")),
    LessonControl(name="way", label="way", values=("a", "b", "c"), start=2),
)


def _lesson(num_scenes: int) -> Lesson:
    board = DiagramFigure(kinds=(), places=())
    return Lesson(
        id="small",
        topic="none",
        title="Small",
        rows=(),
        summary="It is small.",
        source="this test",
        controls=CONTROLS,
        scenes=tuple(
            Scene(frames=(Frame(caption=f"Scene {number}.", figures=(board,)),))
            for number in range(num_scenes)
        ),
    )


def test_a_scene_is_found_by_its_values_in_the_order_of_choices() -> None:
    lesson = _lesson(6)
    for number, chosen in enumerate(choices(CONTROLS)):
        assert lesson.scene(**chosen) is lesson.scenes[number]
    assert choices(CONTROLS)[1] == {"ranks": "2", "way": "b"}
    assert lesson.scene() is lesson.scenes[2], "controls that are not named are at their start"


def test_a_lesson_without_a_scene_for_each_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="6 choices, but 5 scenes"):
        _lesson(5)
    with pytest.raises(KeyError, match="no control color"):
        _lesson(6).scene(color="red")
