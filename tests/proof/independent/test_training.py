"""The steps: one denominator, one norm, and nothing moves in a step that is skipped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.proof.independent.mixture import RouterState
from echelon.proof.independent.training import forward, run_independent
from echelon.proof.oracle.batches import global_batch
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout


def test_the_loss_has_one_denominator() -> None:
    plan = shrink(layout(dp=2), precision="fp64")
    (step,) = run_independent(plan, [global_batch(plan, 0)])
    total = sum(value for value, _ in step.microbatch_losses.values())
    count = sum(number for _, number in step.microbatch_losses.values())
    assert step.loss == pytest.approx(total / count, rel=1e-14)
    assert (step.tokens, len(step.microbatch_losses)) == (count, 2 * plan.num_microbatches)
    squares = sum(float(g.square().sum()) for g in step.gradients.values())
    assert step.grad_norm == pytest.approx(squares**0.5, rel=1e-12)


def test_a_step_that_overflows_changes_nothing() -> None:
    plan = shrink(layout(accumulation=1), precision="fp64")
    precision = replace(plan.mathematics.precision, loss_scaling="dynamic", loss_scale=2.0**1000)
    plan = replace(plan, mathematics=replace(plan.mathematics, precision=precision))
    (step,) = run_independent(plan, [global_batch(plan, 0)])
    assert step.skipped
    assert all(step.after[name].equal(step.before[name]) for name in step.after)


def test_a_forward_pass_notes_the_parts_of_every_sequence() -> None:
    plan = shrink(layout(accumulation=1), precision="fp64")
    (step,) = run_independent(plan, [global_batch(plan, 0)])
    nothing = RouterState(biases={}, shares={})
    passed = forward(plan, step.before, global_batch(plan, 0), 0, nothing)
    assert len(passed.runs) == plan.mathematics.global_sequences
    assert passed.routes() == {}
    sums = {slot: float(total) for slot, (total, _) in passed.sums.items()}
    assert sums == {slot: total for slot, (total, _) in step.microbatch_losses.items()}


def test_a_step_may_begin_with_given_weights_and_keeps_its_own_moments() -> None:
    plan = shrink(layout(accumulation=1), precision="fp64")
    batches = [global_batch(plan, step) for step in range(2)]
    first, by_itself = run_independent(plan, batches)
    moved = {name: value + 0.5 for name, value in first.after.items()}
    _, again = run_independent(plan, batches, begin=[{}, first.after])
    _, other = run_independent(plan, batches, begin=[first.before, moved])
    for name, value in by_itself.after.items():
        assert again.after[name].equal(value)
        assert other.before[name].equal(moved[name])
    assert other.loss != by_itself.loss
