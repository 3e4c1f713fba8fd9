"""One device: plain steps, clipped as everybody clips, in float64 and in the run's precision."""

from __future__ import annotations

import pytest
import torch

from echelon.launch.local.supervisor import RankPool
from echelon.proof.verify.reference import OneDeviceAnswer
from tests.proof.verify.planted_programs import written

TARGET = "echelon.proof.verify.reference:run_one_device"


@pytest.fixture(scope="module")
def answer(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> OneDeviceAnswer:
    file = written(tmp_path_factory.mktemp("one"), "ddp")
    return rank_pool.run(TARGET, {"file": str(file), "ranks": None}, 1)[0]


def test_each_pass_has_a_float64_reference(answer: OneDeviceAnswer) -> None:
    exact, own = answer.passes
    assert (exact.dtype, own.dtype, len(exact.rough), len(own.rough)) == (
        *("float64", "float32"),
        *(0, 8),
    )
    # float64 begins from the numbers that float32 can hold: here it did anyway.
    assert own.exact is exact.exact
    assert own.rough[0].initial["head.bias"].dtype == torch.float32


def test_gradients_are_clipped_by_the_norm_of_all(answer: OneDeviceAnswer) -> None:
    step = answer.passes[0].exact.steps[0]
    norm = sum(float(one.square().sum()) for one in step.gradients.values()) ** 0.5
    assert step.grad_norm == pytest.approx(norm, rel=1e-12)
    assert step.clip_scale == pytest.approx(0.5 / (norm + 1e-6), rel=1e-12)
    # AdamW's first moment is a tenth of the gradient that it took.
    took = step.clipped("head.bias") * 0.1
    assert torch.allclose(step.state["exp_avg"]["head.bias"], took, rtol=1e-12)
    assert step.rates["head.bias"] == (1e-2, 0.1)
    assert torch.equal(step.before["head.bias"], answer.passes[0].exact.initial["head.bias"])


def test_the_same_training_is_rounded_otherwise_in_each_draw(answer: OneDeviceAnswer) -> None:
    draws = [one.steps[0].gradients["head.weight"] for one in answer.passes[1].rough]
    exact = answer.passes[1].exact.steps[0].gradients["head.weight"]
    assert all(float((draw - exact).norm() / exact.norm()) < 1e-5 for draw in draws)
    assert len({float(draw.double().sum()) for draw in draws}) > 2
