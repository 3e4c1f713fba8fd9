"""Interruptions of long runs: least is lost at Young's interval, and Llama 3's figure is met."""

from __future__ import annotations

import random
from math import inf, sqrt
from statistics import mean, stdev

import pytest

from echelon.cost.seconds.interruptions import (
    RESTART_S,
    RETRIED_SLOWER,
    Interruptions,
    checkpoint_bytes,
    interruptions,
    retry_seconds,
    risk_slowdown,
    run_steps,
)


def test_llama_3_was_effective_for_more_than_nine_tenths_of_its_time() -> None:
    """405B weights with 12 bytes of state on 16,384 devices, 419 interruptions in 54 days."""
    one = interruptions(16384, checkpoint_bytes(405e9, 12.0))
    assert one.between_s == pytest.approx(54 * 86400 / 419)
    assert 0.90 < 1.0 / one.slowdown < 0.95


@pytest.mark.parametrize("times", [0.5, 0.8, 1.25, 2.0])
def test_less_is_lost_at_no_other_interval(times: float) -> None:
    """To first order, as Young has it: what is written and what is lost add up."""
    one = interruptions(4096, checkpoint_bytes(70e9, 12.0))

    def lost(interval_s: float) -> float:
        return one.write_s / interval_s + interval_s / (2.0 * one.between_s)

    assert lost(one.interval_s) < lost(times * one.interval_s)


def test_more_devices_are_interrupted_more_often_and_write_faster() -> None:
    few, many = (interruptions(count, 1e12) for count in (8, 8192))
    assert few.between_s == pytest.approx(1024 * many.between_s)
    assert few.write_s == pytest.approx(1024 * many.write_s)
    assert 1.0 < few.slowdown < many.slowdown
    # Half an interval and a restart, by hand.
    assert many.lost_s == many.interval_s / 2.0 + RESTART_S
    # To first order, where interruptions are rare: what is left out are squares of small shares.
    first = (1.0 + many.write_s / many.interval_s) / (1.0 - many.lost_s / many.between_s)
    assert many.slowdown == pytest.approx(first, rel=(first - 1.0) ** 2)
    assert many.slowdown != first


@pytest.mark.parametrize("between_s", [2_000.0, 20_000.0])
def test_a_run_that_is_interrupted_at_random_takes_as_long(between_s: float) -> None:
    """Restarts and the writing of checkpoints are interrupted, too."""
    one, draw = Interruptions(between_s=between_s, write_s=30.0), random.Random(7)
    work = one.interval_s + one.write_s
    taken: list[float] = []
    for _ in range(20_000):
        seconds, left = 0.0, work
        while (until := draw.expovariate(1.0 / between_s)) < left:
            seconds, left = seconds + until, one.restart_s
            while (until := draw.expovariate(1.0 / between_s)) < left:
                seconds += until
            seconds, left = seconds + left, work
        taken.append((seconds + left) / one.interval_s)
    error = stdev(taken) / sqrt(len(taken))
    assert abs(mean(taken) - one.slowdown) < 4.0 * error


def test_a_run_that_is_always_interrupted_never_gets_on() -> None:
    assert Interruptions(between_s=RESTART_S / 200.0, write_s=1.0).slowdown == inf


def test_a_risk_costs_the_plan_that_follows_and_a_restart() -> None:
    assert risk_slowdown(1.0) == 1.0
    assert risk_slowdown(0.0) == RETRIED_SLOWER
    assert retry_seconds(1.0, 10.0) == 0.0
    assert retry_seconds(0.5, 10.0) == RESTART_S / 20.0
    assert run_steps(1e9, 2e6) == pytest.approx(20 * 1e9 / 2e6)
    assert run_steps(1.0, 1e9) == 1.0
