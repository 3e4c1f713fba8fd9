"""The oracle is right: its parts add up, and PyTorch's own optimizer agrees with its formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.core.plan import LearningRateSchedule, Optimizer
from echelon.models.batch import IGNORED_LABEL
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.optimizers import clip_scale, global_norm, learning_rate
from echelon.proof.oracle.oracle import build_decoder, contributions, run_oracle, token_losses
from echelon.proof.shrink import shrink
from echelon.training.optimizer.step import learning_rate as learning_rate_of_the_engine
from tests.proof.layouts import BF16, BF16_SUMS, layout


def test_the_parts_of_all_microbatches_are_the_gradient() -> None:
    plan = shrink(layout(dp=2, model={"dropout": 0.2}), precision="fp64")
    oracle = run_oracle(plan, 2)[1]
    parts = contributions(plan, oracle)
    assert len(parts) == 2 * plan.num_microbatches
    for name, gradient in oracle.gradients.items():
        total = sum(part[name] for part in parts.values())
        torch.testing.assert_close(total, gradient, rtol=1e-12, atol=1e-14)


def test_the_loss_is_the_mean_over_all_valid_tokens() -> None:
    plan = shrink(layout(dp=2), precision="fp64")
    oracle = run_oracle(plan, 1)[0]
    batch = global_batch(plan, 0)
    losses = token_losses(plan, build_decoder(plan, oracle.before), batch, 0).detach()
    valid = batch.labels_BT != IGNORED_LABEL
    assert oracle.tokens == int(valid.sum())
    assert oracle.loss == pytest.approx(float(losses[valid].mean()), rel=1e-14)
    assert float(losses[~valid].abs().sum()) == 0.0
    total = sum(value for value, _ in oracle.microbatch_losses.values())
    assert oracle.loss == pytest.approx(total / oracle.tokens, rel=1e-14)


def test_the_norm_is_over_everything_and_the_clip_acts_above_it() -> None:
    gradients = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}
    assert global_norm(gradients) == 5.0
    assert clip_scale(5.0, 1.0) == 0.2
    assert clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(5.0, None) == 1.0


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_two_writings_of_the_learning_rate_agree(
    schedule: LearningRateSchedule, warmup: int
) -> None:
    optimizer = Optimizer(
        schedule=schedule, warmup_steps=warmup, decay_steps=4, total_steps=12, final_ratio=0.2
    )
    ours = [learning_rate(optimizer, step) for step in range(15)]
    assert ours == pytest.approx(
        [learning_rate_of_the_engine(optimizer, step) for step in range(15)], rel=1e-15
    )
    assert max(ours) == optimizer.learning_rate
    if schedule != "constant":
        assert ours[12] == pytest.approx(0.2 * optimizer.learning_rate)


def test_each_step_of_a_proof_has_its_own_learning_rate() -> None:
    plan = shrink(layout())
    assert len({learning_rate(plan.mathematics.optimizer, step) for step in range(3)}) > 1


def test_the_update_of_a_proof_follows_the_size_of_the_gradient() -> None:
    plan = shrink(layout(), precision="fp64")
    loose = replace(plan.mathematics.optimizer, clip_norm=0.1)
    twice = replace(plan, mathematics=replace(plan.mathematics, optimizer=loose))
    small, large = run_oracle(plan, 1)[0], run_oracle(twice, 1)[0]
    assert large.clip_scale == pytest.approx(2 * small.clip_scale)
    ratio = large.updates["head.weight"].main.norm() / small.updates["head.weight"].main.norm()
    assert 1.2 < float(ratio) < 2.0


def test_mixed_precision_keeps_values_wide_and_computes_in_the_dtype_of_parameters() -> None:
    plan = shrink(layout(dp=2, precision=BF16))
    step = run_oracle(plan, 1)[0]
    assert {value.dtype for value in step.before.values()} == {torch.float32}
    assert {value.dtype for value in step.gradients.values()} == {torch.float32}
    model = build_decoder(plan, step.before)
    name = "layers.0.mlp.up.weight"
    rounded = dict(model.named_parameters())[name]
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, step.before[name].bfloat16())
    assert not torch.equal(rounded.float(), step.before[name])


def test_gradients_are_added_up_in_the_dtypes_of_the_plan() -> None:
    exact = run_oracle(shrink(layout(dp=2), precision="fp64"), 1)[0].gradients
    name = "head.weight"

    def error(**precision: str) -> float:
        own = run_oracle(shrink(layout(dp=2, precision=precision)), 1)[0].gradients[name]
        return float((own.double() - exact[name]).norm() / exact[name].norm())

    assert error() < 1e-6
    assert 1e-3 < error(**BF16) < error(**BF16_SUMS) < 0.05
