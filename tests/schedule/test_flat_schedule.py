"""Lanes: the makespan that the simulation of every schedule gives, to the last bit."""

from __future__ import annotations

from random import Random

import pytest

from echelon.schedule.build import SCHEDULES, build_schedule
from echelon.schedule.flat_schedule import flatten_schedule
from echelon.schedule.simulate import Durations, simulate

RANKS, MICROBATCHES = 4, 12


def uneven(num_stages: int, seed: int) -> Durations:
    """Return durations of stages none of which is like another; transfers are free."""
    random = Random(seed)
    forward, inputs, weights = (
        tuple(random.uniform(0.5, 1.5) for _ in range(num_stages)) for _ in range(3)
    )
    return Durations(
        forward_s=forward,
        input_gradient_s=inputs,
        weight_gradient_s=weights,
        backward_s=tuple(b + w for b, w in zip(inputs, weights, strict=True)),
        transfer_s=(0.0,) * (num_stages - 1),
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_lanes_take_what_the_simulation_takes(name: str) -> None:
    stages = RANKS * SCHEDULES[name].default_virtual_stages
    schedule = build_schedule(
        name, num_stages=stages, num_ranks=RANKS, num_microbatches=MICROBATCHES
    )
    lanes = flatten_schedule(schedule)
    for seed in range(3):
        durations = uneven(stages, seed)
        found = simulate(schedule, durations)
        assert lanes.makespan_s(durations) == found.makespan_s
        assert lanes.busy_s(durations) == pytest.approx(found.busy_s)
    assert [len(row) for row in lanes.rows] == [len(row) for row in schedule.actions]
