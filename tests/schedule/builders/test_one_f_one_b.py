"""1F1B: its order, GPipe's bubble, and p microbatches in memory."""

from __future__ import annotations

import pytest

from echelon.core.errors import InfeasiblePlan
from echelon.schedule.build import build_schedule, builder_of
from tests.schedule.closed_forms import simulated, times_of


def test_1f1b_warms_up_alternates_and_cools_down() -> None:
    schedule = build_schedule("1f1b", num_stages=3, num_ranks=3, num_microbatches=4)
    assert [" ".join(map(str, row)) for row in schedule.actions] == [
        "F0.0 F0.1 F0.2 BW0.0 F0.3 BW0.1 BW0.2 BW0.3",
        "F1.0 F1.1 BW1.0 F1.2 BW1.1 F1.3 BW1.2 BW1.3",
        "F2.0 BW2.0 F2.1 BW2.1 F2.2 BW2.2 F2.3 BW2.3",
    ]


@pytest.mark.system("S19")
def test_it_waits_as_long_as_gpipe_and_holds_p_microbatches_at_most() -> None:
    numbers = {"num_stages": 4, "num_ranks": 4, "num_microbatches": 12}
    ours, gpipe = builder_of("1f1b", **numbers), builder_of("gpipe", **numbers)
    times = times_of(2, 3, 1)
    assert simulated(ours, times).idle_s == simulated(gpipe, times).idle_s == (3 * 6,) * 4
    assert [ours.peak_in_flight(stage) for stage in range(4)] == [4, 3, 2, 1]
    assert gpipe.peak_in_flight(0) == 12


def test_fewer_microbatches_than_ranks_are_refused() -> None:
    with pytest.raises(InfeasiblePlan) as caught:
        build_schedule("1f1b", num_stages=4, num_ranks=4, num_microbatches=3)
    assert caught.value.rules == ("schedule-needs-microbatches",)
