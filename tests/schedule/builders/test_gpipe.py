"""GPipe and the naive schedule: their orders, and what they hold."""

from __future__ import annotations

import pytest

from echelon.schedule.build import build_schedule, builder_of
from tests.schedule.closed_forms import simulated, times_of


def _rows(name: str) -> list[str]:
    schedule = build_schedule(name, num_stages=2, num_ranks=2, num_microbatches=2)
    return [" ".join(map(str, row)) for row in schedule.actions]


def test_naive_finishes_one_microbatch_before_the_next() -> None:
    assert _rows("naive") == ["F0.0 BW0.0 F0.1 BW0.1", "F1.0 BW1.0 F1.1 BW1.1"]


def test_gpipe_runs_all_forwards_first() -> None:
    assert _rows("gpipe") == ["F0.0 F0.1 BW0.0 BW0.1", "F1.0 F1.1 BW1.0 BW1.1"]


@pytest.mark.parametrize(("name", "makespan_s", "held"), [("naive", 180, 1), ("gpipe", 72, 5)])
def test_how_long_a_step_takes_and_what_it_holds(name: str, makespan_s: int, held: int) -> None:
    builder = builder_of(name, num_stages=4, num_ranks=4, num_microbatches=5)
    # 4 ranks x 5 microbatches x 9 s one by one; or 5 + 3 of them where they overlap.
    assert simulated(builder, times_of(3, 4, 2)).makespan_s == makespan_s
    assert {builder.peak_in_flight(stage) for stage in range(4)} == {held}


def test_one_microbatch_is_the_naive_schedule_and_1f1b_outdoes_gpipe_from_p_on() -> None:
    one = [
        build_schedule(name, num_stages=3, num_ranks=3, num_microbatches=1).actions
        for name in ("naive", "gpipe")
    ]
    assert one[0] == one[1]
    builder = builder_of("gpipe", num_stages=3, num_ranks=3, num_microbatches=1)
    assert type(builder).outdone_from(3) == 3
