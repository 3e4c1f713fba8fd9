"""Overflow happens in known steps, or cannot happen; a scale changes nothing else."""

from __future__ import annotations

import pytest
import torch

from echelon.proof.oracle.loss_scale import scale_without_overflow, with_overflow_scale, with_scale
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.shrink import shrink
from tests.proof.layouts import FP16, layout


def test_a_scale_changes_nothing_but_what_overflows() -> None:
    plan = shrink(layout(dp=2, precision=FP16), precision="fp64")
    plain = run_oracle(with_scale(plan, 1.0), 3)
    large = run_oracle(with_scale(plan, 1024.0), 3)
    for one, other in zip(plain, large, strict=True):
        assert (one.grad_norm, one.loss) == (other.grad_norm, other.loss)
        assert all(torch.equal(one.after[name], other.after[name]) for name in one.after)
    assert [step.loss_scale for step in large] == [1024.0, 1024.0, 2048.0]


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_loud_steps_overflow_and_change_nothing_but_the_scale(hysteresis: int) -> None:
    whole = layout(dp=2, precision={**FP16, "loss_scale_hysteresis": hysteresis})
    plan = with_overflow_scale(shrink(whole, precision="fp64"), 3 + hysteresis)
    steps = run_oracle(plan, 3 + hysteresis)
    first = steps[0].loss_scale
    assert [step.skipped for step in steps] == [
        step in range(1, 1 + hysteresis) for step in range(3 + hysteresis)
    ]
    assert [step.loss_scale / first for step in steps] == [1.0] * (1 + hysteresis) + [0.5, 0.5]
    for step in steps:
        same = [torch.equal(step.before[name], step.after[name]) for name in step.after]
        assert all(same) == any(same) == step.skipped
        assert (step.grad_norm == float("inf")) == step.skipped


def test_nothing_overflows_in_the_precision_of_the_plan() -> None:
    whole = layout(dp=2, precision={**FP16, "loss_scale": 2.0**40})
    plan, exact = shrink(whole), shrink(whole, precision="fp64")
    scale = scale_without_overflow(plan, exact, 4)
    assert 2.0**5 < scale < 2.0**16
    steps = run_oracle(with_scale(plan, scale), 4)
    assert [step.loss_scale / scale for step in steps] == [1.0, 1.0, 2.0, 2.0]
    assert not any(step.skipped for step in steps)
