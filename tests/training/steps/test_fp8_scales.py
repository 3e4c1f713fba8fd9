"""Scales of whole tensors as a step part: what a checkpoint keeps of them, and under which plan."""

from __future__ import annotations

import torch

from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine
from echelon.training.steps.fp8_scales import FP8_SCALES, Fp8Scales
from tests.parallel.fp8_scales.test_fp8_scales import TENSOR
from tests.proof.layouts import layout
from tests.training.engine_targets import batches_of


def engine_of(plan: Plan) -> TrainEngine:
    return TrainEngine(plan, Recorder(0, NoEvents()), torch.device("cpu"))


def test_only_a_plan_with_such_scales_has_the_part() -> None:
    assert engine_of(layout()).parts.find(Fp8Scales) is None
    assert engine_of(layout(precision=TENSOR)).parts.find(Fp8Scales) is not None


def test_a_run_goes_on_with_the_numbers_of_the_steps_before() -> None:
    first = engine_of(layout(precision=TENSOR))
    for step in range(2):
        first.step(batches_of(first, step), step)
    position = first.position()
    assert len(position[FP8_SCALES]["history"]) == 2
    second = engine_of(layout(precision=TENSOR))
    second.resume(position)
    assert second.position() == position
    without = {key: value for key, value in position.items() if key != FP8_SCALES}
    third = engine_of(layout(precision=TENSOR))
    third.resume(without)
    assert third.position()[FP8_SCALES]["history"] == []
