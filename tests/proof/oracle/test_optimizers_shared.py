"""What every optimizer of the oracle shares: norms, clipping, the loss scale, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from echelon.core.plan import Precision
from echelon.proof.oracle.optimizers import OracleLossScale, clip_scale, global_norm


def test_the_norm_is_that_of_all_gradients_together() -> None:
    gradients = {"a": torch.tensor([3.0]), "b": torch.tensor([[0.0, 4.0]])}
    assert global_norm(gradients) == 5.0
    assert math.isinf(global_norm({"a": torch.tensor([1e200], dtype=torch.float64)}))


def test_gradients_are_clipped_where_they_are_longer() -> None:
    assert clip_scale(4.0, 1.0) == 0.25
    assert clip_scale(1.0, 1.0) == clip_scale(0.5, 1.0) == clip_scale(4.0, None) == 1.0


def test_a_dynamic_scale_halves_after_its_overflows_and_doubles_after_its_window() -> None:
    precision = Precision(
        parameters="fp16",
        loss_scaling="dynamic",
        loss_scale=8.0,
        loss_scale_min=4.0,
        loss_scale_window=2,
        loss_scale_hysteresis=2,
    )
    scale = OracleLossScale.start(precision)
    seen = [scale.scale]
    for overflow in (True, True, True, False, False, False, False):
        scale.follow(precision, overflow=overflow)
        seen.append(scale.scale)
    assert seen == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0, 16.0]


@pytest.mark.parametrize(("scaling", "value"), [("none", 1.0), ("fixed", 8.0)])
def test_other_scales_stay(scaling: str, value: float) -> None:
    precision = Precision(parameters="fp16", loss_scaling=scaling, loss_scale=8.0)  # type: ignore[arg-type]
    scale = OracleLossScale.start(precision)
    scale.follow(precision, overflow=True)
    assert scale.scale == value
