"""What a plan may be off by follows from what one device is off by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.mesh import Mesh
from echelon.prove.names import family_of
from echelon.prove.oracle import run_oracle
from echelon.prove.shrink import shrink
from echelon.prove.tolerance import (
    FLOAT64_TOLERANCE,
    float64_tolerance,
    num_partial_sums,
    own_tolerance,
    roundoff,
)
from tests.prove.layouts import layout


def test_float64_has_one_tolerance() -> None:
    tolerance = float64_tolerance()
    assert FLOAT64_TOLERANCE == 1e-10
    assert tolerance.allowed("gradients", 0, "head.weight") == FLOAT64_TOLERANCE
    assert not tolerance.own_precision


def test_float32_may_be_off_by_a_few_roundings() -> None:
    plan = shrink(layout(dp=2))
    exact, own = run_oracle(shrink(layout(dp=2), precision="fp64"), 2), run_oracle(plan, 2)
    tolerance = own_tolerance(plan, exact, own, masters_told=False)

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
    lucky = own_tolerance(plan, exact, (fewer, own[1]), masters_told=False)

    name = "layers.1.attention.k.weight"
    assert lucky.one_device["gradients", 0, name] == 0.0
    usual = lucky.one_device["gradients", 1, name]
    assert lucky.allowed("gradients", 0, name) > usual
    assert family_of(name) == family_of("layers.0.attention.k.weight")
    assert family_of("head.weight") == "head.weight"


def test_more_partial_sums_may_round_more() -> None:
    plan = shrink(layout())
    wide = replace(plan, layout=replace(plan.layout, mesh=Mesh(tp=4)))
    assert num_partial_sums(wide) == num_partial_sums(plan) + 3
