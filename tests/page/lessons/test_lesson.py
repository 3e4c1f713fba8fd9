"""A lesson has a scene for each choice, in the order of the product of its controls' values."""

from __future__ import annotations

import pytest

from echelon.page.lessons.lesson import Frame, Lesson, LessonControl, Scene, choices

CONTROLS = (
    LessonControl(name="size", label="size", values=("small", "large"), start=1),
    LessonControl(name="ranks", label="ranks", values=("1", "2", "4")),
)


def lesson(scenes: int) -> Lesson:
    return Lesson(
        id="one",
        topic="Topic",
        title="A title",
        rows=(),
        summary="It shows something.",
        source="here",
        controls=CONTROLS,
        scenes=tuple(
            Scene(frames=(Frame(caption=f"Scene {place}.", figures=()),)) for place in range(scenes)
        ),
    )


def test_the_last_control_changes_fastest() -> None:
    found = choices(CONTROLS)
    assert found[1] == {"size": "small", "ranks": "2"}
    one = lesson(len(found))
    for place, chosen in enumerate(found):
        assert one.scene(**chosen) is one.scenes[place]
    # Where nothing is said, a control is at its start.
    assert one.scene() is one.scenes[3]
    assert one.scene(ranks="4") is one.scenes[5]


def test_a_choice_without_a_scene_and_an_unknown_control_are_refused() -> None:
    with pytest.raises(ValueError, match="one: 6 choices, but 5 scenes"):
        lesson(5)
    with pytest.raises(KeyError, match="no control color"):
        lesson(6).scene(color="red")
