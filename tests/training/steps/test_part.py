"""A part that overrides nothing changes nothing, and a result that is finite."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest
import torch

from echelon.parallel.storage.weights import Shard
from echelon.training.steps.part import CheckpointScope, StepPart, StepResult

RESULT = StepResult(
    step=1,
    loss=2.0,
    tokens=8,
    grad_norm=1.0,
    learning_rate=0.1,
    loss_scale=1.0,
    skipped=False,
    rank_waits_s=(),
    rank_used_bytes=(),
    stop_requests=0,
    microbatch_losses={},
)


def test_a_part_without_methods_of_its_own_passes_everything_on() -> None:
    part, state = StepPart(), dict[str, dict[str, list[Shard]]]()
    with part.running(1.0):
        assert part.gradients_complete() == ()
    assert part.agreed(RESULT, torch.zeros(1, 0)) is RESULT
    assert part.held_back(0) == part.after_update(0, skipped=False) == part.end(1) == ()
    assert part.end_step(RESULT) is part.facts(RESULT) is RESULT
    assert (part.mean_loss(2.0, 8), part.speaks(1)) == (2.0, None)
    assert (part.tensors(), part.position(), part.proven(), part.held()) == ({}, {}, {}, {})
    scope = CheckpointScope()
    assert scope.state(state) is scope.within(state, Path()) is scope.position_of(state) is state
    assert scope.exchange(0) is None


@pytest.mark.parametrize(
    ("loss", "norm", "skipped", "finite"),
    [
        (2.0, 1.0, False, True),
        (nan, 1.0, False, False),
        (2.0, inf, False, False),
        (2.0, inf, True, True),
        (inf, inf, True, False),
    ],
)
def test_a_run_goes_on_from_finite_numbers_or_a_skipped_overflow(
    loss: float, norm: float, skipped: bool, finite: bool
) -> None:
    assert replace(RESULT, loss=loss, grad_norm=norm, skipped=skipped).finite is finite
