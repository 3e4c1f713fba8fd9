"""What a plan may be off by follows from what one device is off by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.mesh import Mesh
from echelon.core.parameters import family_of
from echelon.core.plan import Plan
from echelon.proof.claims.tolerance import (
    FLOAT64_TOLERANCE,
    FLOOR,
    Tolerance,
    float64_tolerance,
    measured,
    num_partial_sums,
    own_tolerance,
    rounded_oracle_runs,
    roundoff,
    tensor_errors,
    unit_roundoff,
)
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.shrink import shrink
from tests.proof.layouts import BF16, layout


def test_float64_has_one_tolerance() -> None:
    tolerance = float64_tolerance()
    assert FLOAT64_TOLERANCE == 1e-10
    assert tolerance.allowed("gradients", 0, "head.weight") == FLOAT64_TOLERANCE
    assert not tolerance.own_precision


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


def test_a_lucky_draw_does_not_make_a_tolerance_small() -> None:
    plan = shrink(layout())
    exact, own = run_oracle(shrink(layout(), precision="fp64"), 2), run_oracle(plan, 2)
    fewer = replace(own[0], gradients=exact[0].gradients)
    lucky = own_tolerance(plan, exact, [(fewer, own[1])], has_masters=False)

    name = "layers.1.attention.k.weight"
    assert lucky.one_device["gradients", 0, name] == 0.0
    usual = lucky.one_device["gradients", 1, name]
    assert lucky.allowed("gradients", 0, name) > usual
    assert family_of(name) == family_of("layers.0.attention.k.weight")
    assert family_of("head.weight") == "head.weight"


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


def test_what_is_zero_by_mathematics_does_not_widen_the_tolerance_of_the_rest() -> None:
    draws = {
        ("gradients", 0, "layers.0.attention.k.bias"): (1e-2, True),
        ("gradients", 0, "norm.weight"): (1e-6, False),
        ("grad_norm", 0, ""): (0.0, False),
    }
    tolerance = measured([draws], 0.0, {})
    allowed = [tolerance.allowed(*key) for key in draws]
    assert allowed == pytest.approx([4e-2, 4e-6, 4e-6])


def test_a_tensor_far_below_the_others_is_noise() -> None:
    exact = {"a": torch.ones(4).double(), "b": torch.full((4,), 1e-9).double()}
    rough = {"a": exact["a"] + 1e-3, "b": exact["b"] + 1e-9}
    draws = dict(tensor_errors("gradients", 0, exact, rough))
    assert draws["gradients", 0, "a"][0] == pytest.approx(1e-3)
    assert [noise for _, noise in draws.values()] == [False, True]
    assert draws["gradients", 0, "b"][0] == pytest.approx(1e-9 / FLOOR)
