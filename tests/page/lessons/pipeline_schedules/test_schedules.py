"""GPipe and 1F1B: charts of the simulator, and the bubble by both definitions."""

from __future__ import annotations

import pytest

from echelon.page.lessons.lesson import choices
from echelon.page.lessons.pipeline_schedules import NAMES, SCHEDULES, pipeline_schedules, slot_run
from echelon.planner.view.document import ScheduleFigure
from tests.page.lessons.reading import facts, figure, holds


@pytest.mark.system("S58")
def test_four_ranks_and_four_microbatches_take_14_slots_or_21() -> None:
    for name in SCHEDULES:
        (frame,) = pipeline_schedules().scene(schedule=NAMES[name], p="4", m="4").frames
        told = facts(frame)
        assert told["slots of the step"] == "14"
        assert frame.facts[0].note == "21 where a backward pass takes two"
        assert holds("distributed-24") == {"backward_1x": 14, "backward_2x": 21}
        both = holds("distributed-21")
        assert told["bubble, of the work"] == f"{100 * both['overhead_vs_ideal']:.1f} %" == "75.0 %"
        share = both["fraction_of_total"]
        assert told["bubble, of the step"] == f"{100 * share:.1f} %" == "42.9 %"
        assert told["efficiency"] == f"{100 * holds('distributed-23'):.1f} %" == "57.1 %"


def test_1f1b_holds_fewer_and_waits_as_long() -> None:
    lesson = pipeline_schedules()
    gpipe, other = (lesson.scene(schedule=NAMES[one], p="4", m="8").frames[0] for one in SCHEDULES)
    held = "microbatches held, rank by rank"
    claimed = holds("distributed-25")
    assert facts(gpipe)[held] == ", ".join(map(str, claimed["gpipe"]))
    assert facts(other)[held] == ", ".join(map(str, claimed["1f1b"])) == "4, 3, 2, 1"
    for name in ("efficiency", "bubble, of the step", "bubble, of the work", "slots of the step"):
        assert facts(gpipe)[name] == facts(other)[name]


def test_every_choice_is_drawn_or_refused() -> None:
    lesson = pipeline_schedules()
    refused = []
    for chosen, scene in zip(choices(lesson.controls), lesson.scenes, strict=True):
        (frame,) = scene.frames
        if not frame.figures:
            refused.append((chosen["schedule"], chosen["p"], chosen["m"]))
            assert facts(frame) == {"rule": "schedule-needs-microbatches"}
            continue
        name = {NAMES[one]: one for one in SCHEDULES}[chosen["schedule"]]
        run = slot_run(name, int(chosen["p"]), int(chosen["m"]), 1)
        (chart,) = figure(frame, ScheduleFigure).charts
        assert chart.span_s == run.simulation.makespan_s
        closed = run.builder.bubble_fraction(run.times)
        assert run.simulation.bubble_fraction == pytest.approx(closed, rel=1e-12)
        assert facts(frame)["bubble, of the step"] == f"{100 * closed:.1f} %"
    assert refused == [("1F1B", "8", "4")]
