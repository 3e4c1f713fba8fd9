"""What `ec.parallelize` is given must be what the plan asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.api.parallelizing import parallelize
from echelon.core.errors import ConfigError
from tests.parallel.module.pipeline.targets import Case, plan

CASE = Case(plan=plan())


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, "split, loss, example"),
        ({"split": "blocks", "loss": "causal"}, "example"),
        ({"split": "blocks", "example": CASE.example()}, "loss"),
    ],
)
def test_what_a_pipeline_asks_for(given: dict[str, Any], missing: str) -> None:
    with pytest.raises(ConfigError, match="module-loss") as caught:
        parallelize(CASE.make(), CASE.plan, **given)
    assert f"mesh.pp = 2 asks for {missing}\n" in str(caught.value)


def test_units_are_not_what_a_pipeline_gathers() -> None:
    with pytest.raises(ConfigError, match="module-argument"):
        parallelize(
            CASE.make(),
            CASE.plan,
            split="blocks",
            loss="causal",
            example=CASE.example(),
            units=["blocks.0"],
        )


def test_a_step_of_ours_needs_a_loss() -> None:
    one = Case(plan=plan(pp=1, microbatches=4))
    _, optimizer = parallelize(one.make(), one.plan)
    with pytest.raises(ConfigError, match="module-loss"):
        optimizer.backward(one.batch(0))
    with pytest.raises(ConfigError, match="module-loss"):
        optimizer.evaluate(one.batch(0))


def test_a_loss_of_two_functions() -> None:
    # Two samples count, of which each microbatch has one: the mean over samples, not tokens.
    one = Case(plan=plan(pp=1, microbatches=2))
    model, optimizer = parallelize(
        one.make(),
        one.plan,
        split="blocks",
        loss=(lambda logits, batch: logits.square().sum(), lambda batch: len(batch["tokens"])),
    )
    batch = one.batch(0)
    with torch.no_grad():
        expected = float(model(batch["tokens"]).square().sum()) / 2
    report = optimizer.backward(batch)
    assert report.count == 2
    assert report.loss == pytest.approx(expected, rel=1e-12)
