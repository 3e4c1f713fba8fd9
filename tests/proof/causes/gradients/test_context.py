"""Gradients that come home right are right; each wrong way home gives others."""

from __future__ import annotations

import pytest
import torch

from echelon.core.plan import Plan
from echelon.models.operations import Operations
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.gradients.context import (
    GradientMisrouting,
    gradient_misroutings,
    misrouted_attention,
)
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import OracleStep, build_decoder, run_oracle, token_losses
from tests.proof.layouts import CONTEXTS, context_layout


def _gradients(
    plan: Plan, oracle: OracleStep, operations: Operations, names: list[str]
) -> list[torch.Tensor]:
    model = build_decoder(plan, oracle.before, operations)
    batch = global_batch(plan, oracle.step)
    loss = token_losses(plan, model, batch, oracle.step).sum() / oracle.tokens
    return list(torch.autograd.grad(loss, [model.get_parameter(name) for name in names]))


@pytest.mark.parametrize("kind", CONTEXTS)
def test_gradients_that_come_home_right_are_right(kind: str) -> None:
    plan = context_layout(kind)
    (oracle,) = run_oracle(plan, 1)
    right = GradientMisrouting(
        ProofFinding("1", "right"),
        lambda place, heads, gradient: gradient,
    )
    names = [name for name in oracle.gradients if name.startswith("layers.")]
    found = _gradients(plan, oracle, misrouted_attention(plan, right), names)
    for name, gradient in zip(names, found, strict=True):
        torch.testing.assert_close(gradient, oracle.gradients[name])


@pytest.mark.parametrize("kind", CONTEXTS)
def test_no_wrong_way_home_gives_the_right_gradients_or_those_of_another(kind: str) -> None:
    plan = context_layout(kind)
    (oracle,) = run_oracle(plan, 1)
    names = [f"layers.1.attention.{part}.weight" for part in ("q", "k", "v")]
    right = torch.cat([oracle.gradients[name].flatten() for name in names])
    seen: list[torch.Tensor] = []
    for way in gradient_misroutings(plan):
        found = _gradients(plan, oracle, misrouted_attention(plan, way), names)
        one = torch.cat([gradient.flatten() for gradient in found])
        wrong = float((one - right).norm() / right.norm())
        # What comes home at a step where nothing does is nothing lost.
        assert wrong > 1e-4 or way.finding.factor == "stale", way.finding.description
        seen.append(one)
    assert len(seen) >= 3
