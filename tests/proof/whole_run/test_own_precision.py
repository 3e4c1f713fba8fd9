"""A run in its own precision holds; what is not saved, not reset or not skipped is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.plan import Plan
from echelon.launch.local.supervisor import RankPool
from echelon.proof.whole_run.own_precision import (
    has_own_run,
    overflows_of,
    own_precision_pass,
    predicted_scales,
)
from tests.proof.layouts import BF16, FP16, Changes, layout

WRONG = "tests.proof.whole_run.wrong_scales"
PATIENT: Changes = {**FP16, "loss_scale_hysteresis": 2}
FP8: Changes = {**BF16, "matmul": "fp8", "fp8_block": 8, "fp8_scales": "tensor"}


@pytest.mark.parametrize(
    "plan",
    [
        layout(tp=2, precision=PATIENT),
        layout(dp=2, zero={"stage": 3}, precision={**FP16, "loss_scaling": "fixed"}),
        layout(tp=2, precision=FP8),
    ],
    ids=["dynamic", "fixed", "fp8"],
)
def test_a_run_in_its_own_precision_holds(rank_pool: RankPool, plan: Plan) -> None:
    assert has_own_run(plan)
    result = own_precision_pass(plan, run_ranks=rank_pool.run)
    assert result.diagnosis is None, result.diagnosis.sentence()
    assert all(claim.compared for claim in result.claims)
    assert [claim.rule.id for claim in result.claims] == [
        *["prove-trainer-scale"] * (2 if plan.mathematics.precision.has_tensor_scales else 1),
        *["prove-trainer-resume"] * 2,
        "prove-trainer-import",
    ]


def test_scales_follow_from_the_overflows() -> None:
    plan = layout(precision={**FP16, "loss_scale": 16.0, "loss_scale_window": 2})
    assert overflows_of(plan) == (1, 3, 6)
    assert predicted_scales(plan) == [16, 16, 8, 8, 4, 4, 8, 4, 4]
    precision = replace(plan.mathematics.precision, loss_scale_hysteresis=2)
    patient = replace(plan, mathematics=replace(plan.mathematics, precision=precision))
    assert predicted_scales(patient) == [16, 16, 16, 16, 8, 8, 16, 16, 16]


def test_float32_has_no_run_of_its_own() -> None:
    assert not has_own_run(layout())
    assert overflows_of(layout(precision=BF16)) == ()


BUGS = (
    (PATIENT, "loss_scale_is_not_saved", "prove-trainer-resume", 3, "loss_scale.hysteresis_left"),
    (PATIENT, "hysteresis_is_not_saved", "prove-trainer-resume", 3, "loss_scale.hysteresis_left"),
    (PATIENT, "hysteresis_is_not_reset", "prove-trainer-scale", 7, "loss scale on rank 0"),
    (PATIENT, "step_is_not_skipped", "prove-trainer-scale", 1, "num_updates on rank 0"),
    (FP8, "largest_numbers_are_not_resumed", "prove-trainer-resume", 3, "fp8_scales.history"),
    (FP8, "last_of_the_history_is_lost", "prove-trainer-resume", 3, "fp8_scales.history"),
    (FP8, "updates_are_counted_from_zero", "prove-trainer-resume", 4, "fp8_scales.weights"),
    (FP16, "no_number_is_no_overflow", "prove-trainer-scale", 3, "step on rank 0"),
    (FP16, "scale_falls_below_its_floor", "prove-trainer-scale", 4, "loss scale on rank 0"),
    (FP8, "history_of_all_steps", "prove-trainer-scale", 3, "steps that scales of 8 bits look"),
    (FP8, "scales_of_the_last_step", "prove-trainer-scale", 2, "scales of "),
    (BF16, "parameters_are_not_those_of_a_file", "prove-trainer-import", 0, "validation loss"),
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("precision", "bug", "rule", "step", "subject"), BUGS, ids=[bug[1] for bug in BUGS]
)
def test_a_bug_in_the_own_precision_is_named(
    rank_pool: RankPool, precision: Changes, bug: str, rule: str, step: int, subject: str
) -> None:
    plan = layout(precision=precision, accumulation=1)
    result = own_precision_pass(plan, run_ranks=rank_pool.run, train=f"{WRONG}:{bug}").diagnosis
    assert result is not None
    assert (result.rule, result.step) == (rule, step), result.sentence()
    assert result.tensor.startswith(subject), result.sentence()


@pytest.mark.slow
def test_an_overflow_of_another_rank_is_not_forgotten(rank_pool: RankPool) -> None:
    wrong = f"{WRONG}:overflows_of_the_first_rank_alone"
    for plan in (layout(tp=2, precision=FP16), layout(pp=2, precision=FP16)):
        result = own_precision_pass(plan, run_ranks=rank_pool.run, train=wrong).diagnosis
        assert result is not None
        assert (result.rule, result.step) == ("prove-trainer-scale", 3), result.sentence()
        assert "it ends the run: error[loss-not-finite]: step 4" in result.sentence()
