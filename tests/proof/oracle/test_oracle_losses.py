"""The loss of a step again, in parts that add up to it."""

from __future__ import annotations

import pytest

from echelon.proof.oracle.oracle import (
    build_decoder,
    loss_of_sequences,
    loss_of_tokens,
    router_loss_gradient,
    run_oracle,
    whole_loss,
)
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout

PLAN = shrink(layout(accumulation=1), precision="fp64")


def test_sequences_and_tokens_add_up_to_the_loss_of_the_step() -> None:
    (step,) = run_oracle(PLAN, 1)
    model = build_decoder(PLAN, step.before)
    each = loss_of_sequences(PLAN, model, step)
    assert each.shape == (PLAN.mathematics.global_sequences,)
    for found in (each.sum(), loss_of_tokens(PLAN, model, step), whole_loss(PLAN, model, step)):
        assert float(found.detach()) == pytest.approx(step.loss, rel=1e-14)


def test_a_dense_model_has_no_router_that_adds_to_a_gradient() -> None:
    (step,) = run_oracle(PLAN, 1)
    assert router_loss_gradient(PLAN, step, "embedding.weight") is None
