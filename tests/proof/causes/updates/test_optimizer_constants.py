"""Constants of the optimizer that are others are found, and told by their values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.core.plan import Optimizer
from echelon.proof.causes.updates.optimizer_constants import ReplayedUpdate, explain_constants
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout
from tests.proof.replicas import replicas

PLAN = shrink(layout(), precision="fp64")
RIGHT: Optimizer = PLAN.mathematics.optimizer


def replayed(name: str, seen: torch.Tensor | None = None, step: int = 1) -> ReplayedUpdate:
    """Return the second update of a tensor, or of what was `seen` in its place."""
    evidence = replicas(PLAN, 2)
    where = torch.ones(evidence.steps[step].before[name].shape, dtype=torch.bool)
    right = evidence.steps[step].updates[name].total
    return ReplayedUpdate(
        spec=evidence.run.specs[name],
        optimizer=RIGHT,
        steps=tuple(evidence.steps[: step + 1]),
        where=where,
        seen=(right if seen is None else seen)[where],
    )


def test_counts_epsilons_and_betas_are_named_with_their_values() -> None:
    one = replayed("head.weight")
    swapped = replace(RIGHT, beta1=RIGHT.beta2, beta2=RIGHT.beta1)
    for made, factor, value in (
        (one.again(RIGHT, ahead=1), "update count", 1),
        (one.again(RIGHT, ahead=-1), "update count", -1),
        (one.again(replace(RIGHT, eps=RIGHT.eps / 7)), "epsilon", RIGHT.eps / 7),
        (one.again(swapped), "betas swapped", None),
    ):
        found = next(explain_constants(replayed("head.weight", made.total)))
        assert found.factor == factor
        assert found.value == (None if value is None else pytest.approx(value, rel=1e-6))
