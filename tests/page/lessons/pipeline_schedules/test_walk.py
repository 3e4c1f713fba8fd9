"""Three schedules in five steps: charts fill, and idle slots are counted."""

from __future__ import annotations

import pytest

from echelon.page.lessons.lesson import DiagramFigure
from echelon.page.lessons.pipeline_schedules import (
    MICROBATCHES,
    NAMES,
    RANKS,
    STEPS,
    pipeline_walk,
    slot_run,
)
from echelon.planner.view.document import ScheduleFigure
from tests.page.lessons.reading import facts, figure, holds

SPANS = {"naive": 32, "gpipe": 14, "1f1b": 14}


@pytest.mark.system("S58")
@pytest.mark.parametrize("name", NAMES)
def test_the_chart_fills_in_five_steps_and_ends_with_the_bubble(name: str) -> None:
    frames = pipeline_walk().scene(schedule=NAMES[name]).frames
    assert len(frames) == STEPS == 5
    run = slot_run(name, RANKS, MICROBATCHES, 1)
    assert run.span == SPANS[name]
    reached = [figure(frame, ScheduleFigure).charts[0].reached or 0 for frame in frames]
    assert reached == sorted(set(reached))
    assert reached[-1] == run.span
    drawn = [
        sum(len(lane.kinds) for lane in figure(frame, ScheduleFigure).charts[0].lanes)
        for frame in frames
    ]
    assert drawn == sorted(drawn)
    assert drawn[-1] == 2 * RANKS * MICROBATCHES
    assert facts(frames[-1])["forward passes done"] == "16 of 16"
    idle = int(facts(frames[-1])["idle slots so far"])
    assert idle == RANKS * run.span - 2 * RANKS * MICROBATCHES
    assert f"{100 * idle / (RANKS * run.span):.1f} %" in frames[-1].caption


def test_the_bubbles_are_those_of_the_guides() -> None:
    table = pipeline_walk().scenes[0].table
    assert table is not None
    told = {row[0]: row[1:] for row in table.rows}
    assert holds("distributed-20") == 0.75
    assert told["Naive"] == ("32", "75.0 %", "1, 1, 1, 1")
    assert told["GPipe"] == ("14", "42.9 %", "4, 4, 4, 4")
    assert told["1F1B"] == ("14", "42.9 %", "4, 3, 2, 1")


def test_ranks_hold_what_the_run_says() -> None:
    for name in NAMES:
        run = slot_run(name, RANKS, MICROBATCHES, 1)
        for frame in pipeline_walk().scene(schedule=NAMES[name]).frames:
            reached = figure(frame, ScheduleFigure).charts[0].reached
            assert reached is not None
            for rank, place in enumerate(figure(frame, DiagramFigure).places):
                shown = tuple(int(tile.label) for tile in place.tiles)
                assert shown == run.held(int(reached), rank)
