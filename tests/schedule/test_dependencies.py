"""What an action needs, and how far the lists of ranks run, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.schedule.action import Action
from echelon.schedule.build import build_schedule
from echelon.schedule.dependencies import required_results, result_name, run_action_lists
from tests.schedule.examples import schedule_of


@pytest.mark.parametrize(
    ("action", "needs"),
    [
        ("F0.3", []),
        ("F1.3", ["F0.3"]),
        ("B0.3", ["F0.3", "B1.3"]),
        ("BW0.3", ["F0.3", "B1.3"]),
        ("B2.3", ["F2.3"]),
        ("BW2.3", ["F2.3"]),
        ("W0.3", ["B0.3"]),
        ("W2.3", ["B2.3"]),
    ],
)
def test_what_an_action_of_three_stages_needs(action: str, needs: list[str]) -> None:
    assert [str(need) for need in required_results(Action.parse(action), 3)] == needs


@pytest.mark.parametrize(
    ("action", "name"), [("F1.2", "F1.2"), ("B1.2", "B1.2"), ("W1.2", "W1.2"), ("BW1.2", "B1.2")]
)
def test_others_wait_for_a_whole_backward_as_for_its_first_half(action: str, name: str) -> None:
    assert str(result_name(Action.parse(action))) == name


def test_ranks_run_as_far_as_they_come() -> None:
    schedule = schedule_of("F0.0 BW0.0 F0.1 BW0.1", "F1.0 F1.1 BW1.0 BW1.1", num_microbatches=2)
    order, heads = run_action_lists(schedule)
    assert sorted(map(str, order)) == ["F0.0", "F1.0"]
    assert heads == [1, 1]


@given(st.sampled_from(["1f1b", "zb-h1", "gpipe"]), st.integers(1, 5), st.integers(0, 5))
def test_each_action_stands_behind_all_that_it_needs(name: str, p: int, extra: int) -> None:
    schedule = build_schedule(name, num_stages=p, num_ranks=p, num_microbatches=p + extra)
    order, heads = run_action_lists(schedule)
    assert heads == [len(row) for row in schedule.actions]
    assert sorted(order, key=str) == sorted((a for row in schedule.actions for a in row), key=str)
    done: set[Action] = set()
    for action in order:
        assert done.issuperset(required_results(action, p))
        done.add(result_name(action))
