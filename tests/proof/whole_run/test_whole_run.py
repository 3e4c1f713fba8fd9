"""A whole run holds under two layouts; a bug anywhere between data and text is named."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.launch.local.supervisor import RankPool
from echelon.proof.shrink import shrink
from echelon.proof.whole_run.whole_run import (
    OUR_TRAINER,
    TrainerTargets,
    prove_with_whole_run,
    whole_run_pass,
)
from tests.proof.layouts import FP16, Changes, layout

FP8: Changes = {"matmul": "fp8", "fp8_block": 8, "fp8_gradients": "e5m2"}
WRONG = "tests.proof.whole_run.wrong_trainers"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "plan",
    [
        layout(dp=2, zero={"stage": 3}, model={"dropout": 0.1}, documents="separate"),
        layout(tp=2, sequence_parallel=True, precision=FP16),
        layout(tp=2, precision={**FP8, "fp8_scales": "tensor", "fp8_history": 2}),
    ],
    ids=["zero", "tensor", "scales of whole tensors"],
)
def test_a_whole_run_holds(rank_pool: RankPool, plan: Plan) -> None:
    shrunk = shrink(plan, precision="fp64")
    found = whole_run_pass(shrunk, run_ranks=rank_pool.run)
    assert found.diagnosis is None
    assert [claim.holds for claim in found.claims] == [True] * 5
    assert all(claim.compared for claim in found.claims)


BUGS = (
    ("train", "same_order_in_every_epoch", "prove-trainer-steps", 1, "loss on rank 0"),
    ("train", "validation_is_a_mean_of_means", "prove-trainer-validation", -1, "validation loss"),
    ("train", "validation_drops_out", "prove-trainer-validation", -1, "validation loss"),
    ("train", "resumed_optimizer_counts_from_zero", "prove-trainer-resume", 2, "loss"),
    ("train", "resumed_run_reads_the_first_samples_again", "prove-trainer-resume", 1, "loss"),
    ("read_back", "last_checkpoint_not_taken", "prove-trainer-checkpoint", 2, "embedding.weight"),
    ("read_back", "text_from_the_first_token_only", "prove-trainer-text", 3, "rows, where text is"),
)


@pytest.mark.quick(
    "train-resumed_run_reads_the_first_samples_again-prove-trainer-resume-1-loss",
)
@pytest.mark.parametrize(("part", "bug", "rule", "step", "tensor"), BUGS, ids=str)
def test_a_bug_of_the_trainer_is_named(
    rank_pool: RankPool, part: str, bug: str, rule: str, step: int, tensor: str
) -> None:
    targets = {"train": OUR_TRAINER.train, "read_back": OUR_TRAINER.read_back}
    trainer = TrainerTargets(**{**targets, part: f"{WRONG}:{bug}"})
    plan = layout(dp=2, zero={"stage": 1}, model={"dropout": 0.1})
    shrunk = shrink(plan, precision="fp64")
    found = whole_run_pass(shrunk, run_ranks=rank_pool.run, trainer=trainer).diagnosis
    assert found is not None
    assert (found.rule, found.step) == (rule, step), found.sentence()
    assert found.tensor.startswith(tensor)


@pytest.mark.slow
def test_a_history_that_is_lost_at_resume_is_named(rank_pool: RankPool) -> None:
    trainer = TrainerTargets(
        train=f"{WRONG}:resumed_scales_look_back_on_nothing", read_back=OUR_TRAINER.read_back
    )
    shrunk = shrink(layout(tp=2, precision={**FP8, "fp8_scales": "tensor"}), precision="fp64")
    found = whole_run_pass(shrunk, run_ranks=rank_pool.run, trainer=trainer).diagnosis
    assert found is not None
    # Before the first step of the run that goes on, its validation says so.
    assert (found.rule, found.step) == ("prove-trainer-resume", 0), found.sentence()
    assert found.tensor.startswith("validation loss")


def test_a_whole_run_of_a_proof_loses_no_island_and_rounds_no_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are judged apart: by a replay, and by bounds of what is rounded."""
    told: list[Plan] = []

    @dataclass(frozen=True)
    class Held:
        proven: bool = True
        whole_run: object = None

    def whole_run(plan: Plan, **_: object) -> str:
        told.append(plan)
        return "run"

    monkeypatch.setattr("echelon.proof.whole_run.whole_run.prove", lambda plan, **_: Held())
    monkeypatch.setattr("echelon.proof.whole_run.whole_run.whole_run_pass", whole_run)
    flags = ["mesh.dp_replicate=2", "local_sgd.every=2", "local_sgd.min_islands=1"]
    flags += ["train.validate_every=never", "checkpoint.every=2"]
    plan = load_job("nano", flags).plan
    zero = replace(plan.layout.zero, reduce="int8")
    plan = replace(plan, layout=replace(plan.layout, zero=zero))
    proof = prove_with_whole_run(plan, run_ranks=cast(Any, None))
    assert cast(Any, proof).whole_run == "run"
    assert told[0].layout.zero.reduce == "exact"
    assert told[0].mathematics.local_sgd.min_islands == "all"
