"""What a plan may be off by follows from what one device is off by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.core.mesh import Mesh
from echelon.core.plan import Plan
from echelon.proof.claims.tolerance import (
    num_partial_sums,
    own_tolerance,
    rounded_oracle_runs,
    roundoff,
    unit_roundoff,
)
from echelon.proof.evidence.evidence import Tolerance
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.shrink import shrink
from tests.proof.layouts import BF16, layout


def test_float32_may_be_off_by_a_few_roundings() -> None:
    plan = shrink(layout(dp=2))
    exact, own = run_oracle(shrink(layout(dp=2), precision="fp64"), 2), run_oracle(plan, 2)
    tolerance = own_tolerance(plan, exact, [own], has_masters=False)

    assert tolerance.own_precision
    assert roundoff(plan) == pytest.approx(2.0**-24)
    for name in exact[0].gradients:
        allowed = tolerance.allowed("gradients", 0, name)
        assert 4 * tolerance.one_device["gradients", 0, name] < allowed < 1e-4
    assert 0 < tolerance.allowed("loss", 0, "") < 1e-5
    assert 0 < tolerance.allowed("grad_norm", 1, "") < 1e-4


def test_one_device_is_rounded_in_several_ways() -> None:
    plan = shrink(layout(precision=BF16))
    exact, name = run_oracle(shrink(layout(), precision="fp64"), 1), "layers.0.mlp.up.weight"
    runs = rounded_oracle_runs(plan, 1)
    errors = [
        own_tolerance(plan, exact, [run], has_masters=True).one_device["gradients", 0, name]
        for run in runs
    ]
    assert len(set(errors)) == len(errors) == 8
    assert max(errors) < 5 * min(errors)
    together = own_tolerance(plan, exact, runs, has_masters=True)
    assert together.one_device["gradients", 0, name] == max(errors)


def test_more_partial_sums_may_round_more() -> None:
    plan = shrink(layout())
    wide = replace(plan, layout=replace(plan.layout, mesh=Mesh(tp=4)))
    assert num_partial_sums(wide) == num_partial_sums(plan) + 3


def tolerances(**chosen: Any) -> tuple[Plan, Tolerance]:
    """Return a shrunk plan and its tolerance, master values being told."""
    whole = layout(dp=2, **chosen)
    plan, exact = shrink(whole), run_oracle(shrink(whole, precision="fp64"), 2)
    return plan, own_tolerance(plan, exact, rounded_oracle_runs(plan, 2), has_masters=True)


def test_a_master_copy_is_judged_more_sharply_than_what_is_rounded_from_it() -> None:
    plan, tolerance = tolerances(precision=BF16)
    name = "layers.0.mlp.up.weight"
    gradient, value, parameter = (
        tolerance.allowed(kind, 1, name) for kind in ("gradients", "masters", "parameters")
    )
    coarse = unit_roundoff("bf16")
    assert roundoff(plan) == coarse == pytest.approx(2.0**-9 * 2)
    assert gradient > num_partial_sums(plan) * coarse
    # An update moves a value by a few hundredths in two steps of a proof.
    assert value < gradient / 20
    assert value < parameter
    # One rounding more, and one device's errors of it: not one for each partial sum.
    assert parameter < 5 * coarse


def test_uniform_precision_has_one_roundoff_for_all() -> None:
    plan, tolerance = tolerances()
    name = "layers.0.mlp.up.weight"
    flat = num_partial_sums(plan) * roundoff(plan)
    assert tolerance.flat_by_key["parameters", 1, name] == tolerance.flat == flat
