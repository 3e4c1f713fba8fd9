"""What is compared on text: equal active weights, equal tokens, and imbalance by hand."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from bench.moe.curves import (
    TITLES,
    VARIANTS,
    WINDOW,
    Curve,
    page,
    run_file,
    settings_of,
)
from echelon.config.load import load_job
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import num_active_parameters
from echelon.core.plan import Plan
from echelon.telemetry.routing import RecordedLoad


def plan_of(variant: str, folder: Path, *, alone: bool) -> Plan:
    given = argparse.Namespace(runs=folder, steps=40, sequences=16, alone=alone)
    return load_job(run_file(variant, folder), settings_of(variant, given)).plan


def routers(shape: ModelShape) -> int:
    """Return the weights of all routers and their biases."""
    if shape.experts is None:
        return 0
    rows = shape.hidden + shape.experts.router_bias
    return shape.layers * shape.experts.num_experts * rows


@pytest.mark.parametrize("alone", [True, False])
def test_runs_differ_in_their_experts_and_what_evens_loads_only(
    alone: bool, tmp_path: Path
) -> None:
    plans = {name: plan_of(name, tmp_path, alone=alone) for name in VARIANTS}
    dense = plans["dense"]
    assert dense.model.experts is None
    for name, plan in plans.items():
        assert plan.mesh.world_size == (1 if alone else 2)
        like = replace(
            plan.mathematics,
            model=replace(dense.model, name=plan.model.name),
            balance=dense.mathematics.balance,
        )
        assert like == replace(dense.mathematics, model=like.model), name
        active = num_active_parameters(plan.model) - routers(plan.model)
        assert active == num_active_parameters(dense.model), name
    kinds = [plan.mathematics.balance.kind for plan in plans.values()]
    assert kinds == ["aux", "bias", "none", "none"]


def curve(*counts: tuple[int, ...]) -> Curve:
    """Return a run of forty steps: its two layers have these counts in turn, and even ones."""
    loads = {
        step: (load_of(0, counts[step % len(counts)]), load_of(1, (1,) * len(counts[0])))
        for step in range(1, 41)
    }
    return Curve(
        active=10,
        total=20,
        losses=[5.0 - step / 10 for step in range(40)],
        loads=loads,
        validations={0: 5.5, 40: 2.0},
    )


def load_of(layer: int, counts: tuple[int, ...]) -> RecordedLoad:
    return RecordedLoad(layer=layer, counts=counts, dropped=0, aux_loss=None, z_loss=None)


def test_loads_of_several_steps_are_added_up_before_they_are_compared() -> None:
    swaying = curve((6, 2), (2, 6))
    assert swaying.imbalance(40) == 1.5
    assert swaying.imbalance(40, WINDOW) == 1.0
    assert swaying.imbalance(3, WINDOW) == pytest.approx(14 / 12)
    assert swaying.loss(40) == pytest.approx(2.05)


def test_the_page_says_what_the_runs_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.moe.curves.BY_STEP", 20)
    curves = {
        "aux": curve((6, 2), (2, 6)),
        "bias": curve((4, 4)),
        "none": curve((7, 1)),
        "dense": replace(curve((1, 1)), loads={}, validations={0: 5.5, 40: 2.5}),
    }
    given = argparse.Namespace(page=Path("page.md"), steps=40, sequences=16, alone=True)
    text = page(curves, given)
    assert "`python -m bench.moe.curves RUNS page.md --steps 40 --sequences 16 --alone`" in text
    assert "\n| 40 | 1.500 (1.000) | 1.000 (1.000) | 1.750 (1.750) | - |\n" in text
    assert f"- {TITLES['none']}: at step 20 the imbalance is 1.750, and 1.750 over" in text
    assert f"- {TITLES['aux']}: at step 40 the training loss is +0.0000 and the" in text
    assert "validation loss -0.5000 beside the dense model's." in text
