"""DualPipe: its order, its two directions, and the bubble of the paper's overlapped pairs."""

from __future__ import annotations

import pytest

from echelon.schedule.action import ActionKind, Schedule
from echelon.schedule.build import build_schedule, builder_of
from echelon.schedule.builders.builder import ActionTimes
from echelon.schedule.builders.dualpipe import DualPipe, DualPipeV
from echelon.schedule.messages import required_results, result_name
from tests.schedule.closed_forms import durations_of, simulated, times_of


def _builder(p: int, m: int) -> DualPipe:
    builder = builder_of("dualpipe", num_stages=p, num_ranks=p, num_microbatches=m)
    assert isinstance(builder, DualPipe)
    return builder


def test_the_list_of_two_ranks() -> None:
    schedule = build_schedule("dualpipe", num_stages=2, num_ranks=2, num_microbatches=4)
    assert (schedule.stage_ranks, schedule.mirrored) == ((0, 1), (2, 3))
    assert [" ".join(map(str, row)) for row in schedule.actions] == [
        "F0.0 F1.2 F0.1 BW1.2 F1.3 BW0.0 BW1.3 B0.1 W0.1",
        "F0.2 F1.0 F0.3 BW1.0 F1.1 BW0.2 BW1.1 B0.3 W0.3",
    ]


def test_each_rank_is_the_mirror_image_of_another() -> None:
    schedule = build_schedule("dualpipe", num_stages=6, num_ranks=6, num_microbatches=14)
    for rank in range(3):
        other = [
            (action.kind, action.stage, (action.microbatch + 7) % 14)
            for action in schedule.actions[5 - rank]
        ]
        assert [(a.kind, a.stage, a.microbatch) for a in schedule.actions[rank]] == other
        assert schedule.stages_of(rank) == (rank, 5 - rank)


@pytest.mark.system("B03")
@pytest.mark.parametrize("p", [2, 4, 8])
def test_a_rank_holds_p_plus_1_microbatches(p: int) -> None:
    builder = _builder(p, 2 * p + 2)
    assert {builder.peak_in_flight_of_rank(rank) for rank in range(p)} == {p + 1}


def makespan_of_pairs(schedule: Schedule, times: ActionTimes, pair_s: float) -> float:
    """Return the seconds of a step in which F and the BW behind it are one block of `pair_s`.

    That is the paper's F&B: both results are there at its end.
    """
    durations = durations_of(schedule.num_stages, times)
    rows = [list(row) for row in schedule.actions]
    done: dict[object, float] = {}
    free = [0.0] * schedule.num_ranks
    while any(rows):
        left = sum(map(len, rows))
        for rank, row in enumerate(rows):
            while row:
                kinds = [action.kind for action in row[:2]]
                paired = kinds == [ActionKind.F, ActionKind.BW] and row[0].stage != row[1].stage
                block = row[: 2 if paired else 1]
                needs = {need for a in block for need in required_results(a, schedule.num_stages)}
                if not needs <= done.keys():
                    break
                start = max([free[rank], *(done[need] for need in needs)])
                free[rank] = start + (pair_s if paired else durations.seconds_of(block[0]))
                done |= dict.fromkeys(map(result_name, block), free[rank])
                del row[: len(block)]
        assert sum(map(len, rows)) < left
    return max(free)


@pytest.mark.system("B03")
@pytest.mark.parametrize("p", [2, 4, 6, 10])
@pytest.mark.parametrize("seconds", [(1, 1, 1), (2, 2, 1), (2, 3, 1), (3, 3, 2)])
def test_the_bubble_of_the_paper_is_that_of_pairs_which_end_together(
    p: int, seconds: tuple[int, int, int]
) -> None:
    builder, times = _builder(p, 3 * p), times_of(*seconds)
    forward, b, w = seconds
    bubble = (p // 2 - 1) * ((forward + b + w) + (b + w) - 3 * w)
    assert builder.paper_bubble_s(times) == bubble
    pairs = makespan_of_pairs(builder.schedule(), times, times.total_s)
    assert pairs == builder.busy_s(times) + bubble


@pytest.mark.parametrize("p", [4, 8])
def test_sending_what_f_made_before_the_pair_ends_saves_one_b_per_hop(p: int) -> None:
    builder, times = _builder(p, 2 * p), times_of(4, 3, 2)
    idle = simulated(builder, times).idle_s[0]
    assert idle == builder.paper_bubble_s(times) - (p // 2 - 1) * 3


def test_an_overlap_shortens_the_bubble_of_the_paper() -> None:
    builder, times = _builder(8, 16), times_of(2, 2, 1)
    assert builder.paper_bubble_s(times) - builder.paper_bubble_s(times, 4) == 3


def _v_builder(p: int, m: int) -> DualPipeV:
    builder = builder_of("dualpipe-v", num_stages=2 * p, num_ranks=p, num_microbatches=m)
    assert isinstance(builder, DualPipeV)
    return builder


def test_the_list_of_one_rank_has_both_stages() -> None:
    (row,) = _v_builder(1, 2).schedule().actions
    assert " ".join(map(str, row)) == "F0.0 F1.0 F0.1 BW1.0 F1.1 BW0.0 BW1.1 B0.1 W0.1"


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 7), (4, 9)])
def test_it_is_the_first_half_of_the_ranks_of_dualpipe(p: int, m: int) -> None:
    half = _v_builder(p, m).schedule()
    whole = build_schedule("dualpipe", num_stages=2 * p, num_ranks=2 * p, num_microbatches=2 * m)
    for rank, row in enumerate(half.actions):
        expected = [(a.kind, a.stage, a.microbatch % m) for a in whole.actions[rank]]
        assert [(a.kind, a.stage, a.microbatch) for a in row] == expected


@pytest.mark.system("B03")
@pytest.mark.parametrize("p", [1, 2, 5])
def test_the_bubble_of_the_paper_is_that_of_pairs_which_end_together_in_a_v(p: int) -> None:
    builder, times = _v_builder(p, 3 * p), times_of(3, 3, 1)
    bubble = (p - 1) * (7 + 4 - 3)
    assert builder.paper_bubble_s(times) == bubble
    pairs = makespan_of_pairs(builder.schedule(), times, times.total_s)
    assert pairs == builder.busy_s(times) + bubble
    assert simulated(builder, times).idle_s[0] == bubble - (p - 1) * 3


def test_a_rank_holds_one_half_stage_more_than_zb_v() -> None:
    builder = _v_builder(4, 16)
    other = builder_of("zb-v", num_stages=8, num_ranks=4, num_microbatches=16)
    for rank in range(4):
        assert builder.peak_in_flight_of_rank(rank) == other.peak_in_flight_of_rank(rank) + 1
