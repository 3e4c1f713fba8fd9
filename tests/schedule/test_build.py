"""The builders: their lists, their closed forms, and what they refuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.core.errors import ConfigError, InfeasiblePlan
from echelon.schedule.build import (
    SCHEDULES,
    build_schedule,
    builder_of,
    minimum_microbatches,
    schedule_problems,
)
from echelon.schedule.builder import Builder
from echelon.schedule.check import check_schedule
from echelon.schedule.simulate import Durations, simulate

names = st.sampled_from(sorted(SCHEDULES))


def _builder(name: str, p: int, m: int) -> Builder:
    return builder_of(name, num_stages=p, num_ranks=p, num_microbatches=m)


def _rows(name: str, p: int, m: int) -> list[str]:
    schedule = build_schedule(name, num_stages=p, num_ranks=p, num_microbatches=m)
    return [" ".join(map(str, row)) for row in schedule.actions]


def test_naive_finishes_one_microbatch_before_the_next() -> None:
    assert _rows("naive", 2, 2) == ["F0.0 BW0.0 F0.1 BW0.1", "F1.0 BW1.0 F1.1 BW1.1"]


def test_gpipe_runs_all_forwards_first() -> None:
    assert _rows("gpipe", 2, 2) == ["F0.0 F0.1 BW0.0 BW0.1", "F1.0 F1.1 BW1.0 BW1.1"]


def test_1f1b_warms_up_alternates_and_cools_down() -> None:
    assert _rows("1f1b", 3, 4) == [
        "F0.0 F0.1 F0.2 BW0.0 F0.3 BW0.1 BW0.2 BW0.3",
        "F1.0 F1.1 BW1.0 F1.2 BW1.1 F1.3 BW1.2 BW1.3",
        "F2.0 BW2.0 F2.1 BW2.1 F2.2 BW2.2 F2.3 BW2.3",
    ]


@given(names, st.integers(1, 8), st.integers(0, 12))
def test_every_list_is_proved_and_holds_what_the_closed_form_says(
    name: str, p: int, extra: int
) -> None:
    builder = _builder(name, p, minimum_microbatches(name, p) + extra)
    report = check_schedule(builder.schedule())
    expected = tuple(builder.peak_in_flight(stage) for stage in range(p))
    assert report.peak_in_flight_per_stage == report.peak_in_flight_per_rank == expected
    assert report.num_messages == 2 * (p - 1) * builder.num_microbatches
    assert report.consumes_in_order


@given(names, st.integers(1, 8), st.integers(0, 12), st.integers(1, 5), st.integers(1, 9))
def test_the_simulated_bubble_is_the_closed_form(
    name: str, p: int, extra: int, forward: int, backward: int
) -> None:
    builder = _builder(name, p, minimum_microbatches(name, p) + extra)
    durations = Durations.uniform(p, forward_s=forward, backward_s=backward)
    result = simulate(builder.schedule(), durations)
    assert result.bubble_fraction == pytest.approx(builder.bubble_fraction(), abs=1e-12)
    assert result.bubble_overhead == pytest.approx(builder.bubble_overhead(), abs=1e-12)


@given(names, st.integers(1, 6), st.integers(0, 6))
def test_gradients_add_up_in_the_same_order_under_every_schedule(
    name: str, p: int, extra: int
) -> None:
    schedule = _builder(name, p, p + extra).schedule()
    for row in schedule.actions:
        backwards = [action.microbatch for action in row if action.kind == "BW"]
        assert backwards == list(range(p + extra))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_minimum_is_accepted_and_one_fewer_is_not(name: str) -> None:
    for p in (1, 2, 5):
        fewest = minimum_microbatches(name, p)
        _builder(name, p, fewest)
        with pytest.raises(InfeasiblePlan) as caught:
            _builder(name, p, fewest - 1)
        assert caught.value.rules == ("schedule-needs-microbatches",)


def test_minimum_microbatches_of_each_schedule() -> None:
    assert {name: minimum_microbatches(name, 4) for name in SCHEDULES} == {
        "naive": 1,
        "gpipe": 1,
        "1f1b": 4,
    }


def test_too_few_microbatches_names_the_numbers_and_what_works() -> None:
    with pytest.raises(InfeasiblePlan) as caught:
        build_schedule("1f1b", num_stages=4, num_ranks=4, num_microbatches=2)
    (problem,) = caught.value.problems
    assert problem.rule == "schedule-needs-microbatches"
    assert "4 stages needs at least 4 microbatches, but a step has 2" in problem.message
    assert problem.works == (
        "4 microbatches",
        "16 microbatches",
        "schedule = 'naive'",
        "schedule = 'gpipe'",
    )


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        build_schedule("1F1B", num_stages=1, num_ranks=1, num_microbatches=1)
    (problem,) = caught.value.problems
    assert problem.rule == "schedule-known"
    assert "did you mean '1f1b'?" in problem.message
    assert problem.works == ("naive", "gpipe", "1f1b")
    with pytest.raises(ConfigError):
        minimum_microbatches("zigzag", 2)
    assert schedule_problems("zigzag", num_stages=1, num_ranks=1, num_microbatches=1)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("num_stages", "num_ranks"), [(4, 2), (1, 2), (0, 0)])
def test_another_number_of_stages_than_ranks_is_refused(
    name: str, num_stages: int, num_ranks: int
) -> None:
    with pytest.raises(InfeasiblePlan) as caught:
        build_schedule(name, num_stages=num_stages, num_ranks=num_ranks, num_microbatches=8)
    assert caught.value.rules == ("schedule-stages-per-rank",)
    assert f"{num_stages} stages for {num_ranks} ranks" in str(caught.value)


def test_all_problems_come_at_once() -> None:
    problems = schedule_problems("1f1b", num_stages=4, num_ranks=2, num_microbatches=1)
    assert [problem.rule for problem in problems] == [
        "schedule-stages-per-rank",
        "schedule-needs-microbatches",
    ]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_builder_names_its_paper(name: str) -> None:
    assert SCHEDULES[name].name == name
    assert "arXiv" in SCHEDULES[name].paper
