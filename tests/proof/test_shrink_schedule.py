"""A proof has a step on both sides of every change of phase, and no more steps than it needs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from echelon.core.plan import Plan
from echelon.proof.oracle.optimizers import learning_rate
from echelon.proof.shrink import shrink
from echelon.proof.shrink_schedule import num_overflows, num_rounded_steps, num_steps, num_updates
from tests.proof.layouts import FP16, layout


def rates(plan: Plan) -> list[float]:
    """Return the learning rates of the steps of a proof that update, over the highest."""
    small, skipped = shrink(plan), num_overflows(plan)
    optimizer = small.mathematics.optimizer
    taken = [step for step in range(num_steps(small)) if step not in range(1, 1 + skipped)]
    return [learning_rate(optimizer, step) / optimizer.learning_rate for step in taken]


def plan_of(**optimizer: Any) -> Plan:
    """Return a plan whose final rate is half of the highest."""
    chosen = {"total_steps": 900, "final_ratio": 0.5, **optimizer}
    return layout(optimizer=chosen)


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        ({"schedule": "linear"}, [0.5, 1.0, 1.0, 5 / 6, 4 / 6]),
        ({"schedule": "cosine"}, [0.5, 1.0, 1.0, 0.875, 0.625]),
        ({"schedule": "constant"}, [0.5, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "wsd", "decay_steps": 90}, [0.5, 1.0, 1.0, 1.0, 0.75]),
        ({"schedule": "linear", "warmup_steps": 0}, [1.0, 0.9, 0.8, 0.7, 0.6]),
        ({"schedule": "wsd", "decay_steps": 90, "warmup_steps": 0}, [1.0, 1.0, 1.0, 1.0, 0.75]),
        ({"schedule": "linear", "kind": "sgd"}, [0.5, 1.0, 1.0, 5 / 6, 4 / 6]),
        ({"schedule": "constant", "kind": "sgd", "warmup_steps": 0}, [1.0, 1.0, 1.0]),
        ({"schedule": "constant", "kind": "sgd"}, [0.5, 1.0, 1.0]),
        ({"schedule": "linear", "kind": "sgd", "warmup_steps": 0}, [1.0, 5 / 6, 4 / 6]),
    ],
)
def test_every_phase_is_met_on_both_sides(optimizer: dict[str, Any], wanted: list[float]) -> None:
    assert rates(plan_of(**optimizer)) == pytest.approx(wanted)


def test_a_decay_of_another_speed_or_start_has_other_rates() -> None:
    for schedule in ("linear", "cosine", "wsd"):
        found = rates(plan_of(schedule=schedule, decay_steps=90 if schedule == "wsd" else 0))
        assert found[0] < found[1] == found[2] > found[-1]
        assert found[-1] > 0.5, "twice as fast is over: the last rate"


def test_steps_that_overflow_hide_no_phase() -> None:
    chosen = {"schedule": "linear", "final_ratio": 0.5, "total_steps": 900}
    for hysteresis in (1, 2, 5):
        precision = {**FP16, "loss_scale_hysteresis": hysteresis}
        plan = layout(optimizer=chosen, precision=precision)
        assert num_overflows(plan) == min(2, hysteresis)
        assert num_steps(plan) == 5 + min(2, hysteresis)
        assert num_rounded_steps(plan) == 3 + min(2, hysteresis)
        first, *rest = rates(plan)
        assert first < 0.5
        assert rest == pytest.approx([1.0, 1.0, 5 / 6, 4 / 6])
        assert all(earlier >= later for earlier, later in pairwise(rest))


def test_what_counts_updates_takes_five() -> None:
    still = {"schedule": "constant", "warmup_steps": 0}
    for kind, steps in (("adamw", 5), ("muon", 5), ("sgd", 3)):
        plan = layout(optimizer={**still, "kind": kind})
        assert num_updates(plan.mathematics) == num_updates(shrink(plan).mathematics) == steps
    scaled = layout(optimizer={**still, "kind": "sgd"}, precision=FP16)
    assert num_updates(scaled.mathematics) == 5
