"""Charts in slots: what is drawn is what the simulator says, as far as it is told."""

from __future__ import annotations

import pytest

from echelon.page.lessons.pipeline_schedules import NAMES, gantt, slot_run


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_chart_has_every_action_of_the_schedule(name: str) -> None:
    run = slot_run(name, 4, 4, 1)
    figure = gantt(run)
    (chart,) = figure.charts
    assert figure.unit == "slots"
    assert chart.span_s == chart.reached == run.span
    schedule = run.builder.schedule()
    for rank, lane in enumerate(chart.lanes):
        drawn = [
            (figure.kinds[kind], stage, microbatch)
            for kind, stage, microbatch in zip(
                lane.kinds, lane.stages, lane.microbatches, strict=True
            )
        ]
        words = {"F": "forward", "BW": "backward"}
        assert drawn == [
            (words[one.kind.value], one.stage, one.microbatch) for one in schedule.actions[rank]
        ]
        assert all(end - start == 1 for start, end in zip(lane.starts, lane.ends, strict=True))


def test_until_a_slot_only_what_began_before_is_there() -> None:
    run = slot_run("gpipe", 4, 4, 2)
    assert run.span == 21
    for reached in range(1, run.span + 1):
        (chart,) = gantt(run, reached).charts
        for rank, lane in enumerate(chart.lanes):
            assert all(start < reached for start in lane.starts)
            assert all(end <= reached for end in lane.ends)
            busy = sum(end - start for start, end in zip(lane.starts, lane.ends, strict=True))
            assert run.idle(reached, rank) == reached - busy
    assert sum(run.idle(run.span, rank) for rank in range(4)) == sum(run.simulation.idle_s)


def test_what_a_rank_holds_follows_its_actions() -> None:
    for name in NAMES:
        run = slot_run(name, 4, 8 if name == "1f1b" else 4, 1)
        for rank in range(4):
            held = [run.held(slot, rank) for slot in range(run.span + 1)]
            # One that is computed while another arrives is counted by the peak of the schedule.
            peak = run.builder.peak_in_flight(rank)
            assert peak - 1 <= max(map(len, held)) <= peak
            assert held[-1] == ()
