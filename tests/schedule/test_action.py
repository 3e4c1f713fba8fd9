"""Actions and schedules as text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.build import build_schedule
from tests.schedule.examples import runnable_schedules


def test_an_action_reads_as_kind_stage_and_microbatch() -> None:
    assert str(Action(ActionKind.F, 0, 3)) == "F0.3"
    assert str(Action(ActionKind.BW, 12, 0)) == "BW12.0"


@given(st.sampled_from(ActionKind), st.integers(0, 999), st.integers(0, 9999))
def test_an_action_is_read_back(kind: ActionKind, stage: int, microbatch: int) -> None:
    action = Action(kind, stage, microbatch)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F", "F0", "F0.", "X0.1", "f0.1", "F-1.0", "F0.1 ", "WB0.1"])
def test_other_text_is_no_action(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action such as"):
        Action.parse(text)


@given(runnable_schedules)
def test_a_schedule_is_read_back_from_json(schedule: Schedule) -> None:
    assert Schedule.from_json(schedule.to_json()) == schedule


def test_the_json_shows_one_line_of_actions_per_rank() -> None:
    text = build_schedule("gpipe", num_stages=2, num_ranks=2, num_microbatches=1).to_json()
    assert text.splitlines()[1:3] == ['  "F0.0 BW0.0",', '  "F1.0 BW1.0"']
    assert json.loads(text)["stage_ranks"] == [0, 1]


@pytest.mark.parametrize(
    ("entry", "value", "says"),
    [
        ("schema", 1, "schedule schema 1; this version reads 2"),
        ("num_ranks", "2", "num_ranks: expected a whole number"),
        ("num_microbatches", True, "num_microbatches: expected a whole number"),
        ("stage_ranks", 0, "stage_ranks: expected a list"),
        ("actions", ["F0.0 Q0.0"], "'Q0.0' is not an action"),
        ("actions", [3], "actions: expected text"),
        ("name", None, "name: expected text"),
        ("extra", 1, "a schedule has the entries"),
    ],
)
def test_json_that_is_no_schedule_is_refused(entry: str, value: object, says: str) -> None:
    data = json.loads(
        build_schedule("gpipe", num_stages=2, num_ranks=2, num_microbatches=1).to_json()
    )
    data[entry] = value
    with pytest.raises(ValueError, match=says):
        Schedule.from_json(json.dumps(data))


def test_json_that_is_no_object_is_refused() -> None:
    with pytest.raises(ValueError, match="a JSON object"):
        Schedule.from_json("[]")


def test_a_rank_lists_its_stages() -> None:
    schedule = Schedule(
        name="v", num_ranks=2, num_microbatches=0, stage_ranks=(0, 1, 1, 0), actions=((), ())
    )
    assert (schedule.num_stages, schedule.stages_of(0), schedule.stages_of(1)) == (
        4,
        (0, 3),
        (1, 2),
    )
