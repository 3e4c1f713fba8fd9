"""The learning rate at every boundary of every schedule."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.plan import Optimizer
from echelon.training.optimizer.step import learning_rate
from tests.walks import examples

BASE = Optimizer(
    learning_rate=0.8, schedule="cosine", warmup_steps=4, total_steps=104, final_ratio=0.25
)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_warm_up_is_linear_and_ends_at_the_peak(schedule: str) -> None:
    optimizer = replace(BASE, schedule=schedule, decay_steps=20)
    rates = [learning_rate(optimizer, step) for step in range(5)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert learning_rate(replace(BASE, warmup_steps=0), 0) == 0.8


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [
        ("constant", 50, 0.8),
        ("constant", 104, 0.8),
        ("linear", 54, 0.5),
        ("linear", 104, 0.2),
        ("cosine", 4, 0.8),
        ("cosine", 29, 0.2 + 0.6 * (1 + 0.5**0.5) / 2),
        ("cosine", 54, 0.5),
        ("cosine", 104, 0.2),
        ("wsd", 83, 0.8),
        ("wsd", 84, 0.8),
        ("wsd", 94, 0.5),
        ("wsd", 104, 0.2),
    ],
)
def test_known_rates(schedule: str, step: int, rate: float) -> None:
    optimizer = replace(BASE, schedule=schedule, decay_steps=20 if schedule == "wsd" else 0)
    assert learning_rate(optimizer, step) == pytest.approx(rate)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_after_the_end_the_rate_stays(schedule: str) -> None:
    optimizer = replace(BASE, schedule=schedule, decay_steps=20)
    assert learning_rate(optimizer, 1000) == pytest.approx(0.2)


@given(
    schedule=st.sampled_from(("constant", "linear", "cosine", "wsd")),
    warmup=st.integers(0, 20),
    total=st.integers(21, 60),
    final=st.floats(0, 1),
)
@settings(deadline=None, max_examples=examples(60))
def test_rates_rise_then_never_rise_again(
    schedule: str, warmup: int, total: int, final: float
) -> None:
    optimizer = replace(
        BASE, schedule=schedule, warmup_steps=warmup, total_steps=total, final_ratio=final,
        decay_steps=max(1, (total - warmup) // 2),  # without any, wsd is refused: it never falls
    )  # fmt: skip
    rates = [learning_rate(optimizer, step) for step in range(total + 2)]
    assert all(0 < rate <= 0.8 + 1e-12 for rate in rates[:total])
    rising, falling = rates[:warmup], rates[max(0, warmup - 1) :]
    assert rising == sorted(rising)
    assert all(b <= a + 1e-15 for a, b in pairwise(falling))
    if schedule != "constant":
        assert rates[total] == pytest.approx(0.8 * final)
