"""Interruptions of long runs: least is lost at Young's interval, and Llama 3's figure is met."""

from __future__ import annotations

from math import inf

import pytest

from echelon.cost.interruptions import (
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
    by_hand = (1.0 + many.write_s / many.interval_s) / (1.0 - many.lost_s / many.between_s)
    assert many.slowdown == by_hand


def test_a_run_that_is_interrupted_before_it_has_started_never_gets_on() -> None:
    assert Interruptions(between_s=RESTART_S, write_s=1.0).slowdown == inf


def test_a_risk_costs_the_plan_that_follows_and_a_restart() -> None:
    assert risk_slowdown(1.0) == 1.0
    assert risk_slowdown(0.0) == RETRIED_SLOWER
    assert retry_seconds(1.0, 10.0) == 0.0
    assert retry_seconds(0.5, 10.0) == RESTART_S / 20.0
    assert run_steps(1e9, 2e6) == pytest.approx(20 * 1e9 / 2e6)
    assert run_steps(1.0, 1e9) == 1.0
