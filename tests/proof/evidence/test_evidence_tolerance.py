"""What the draws of one device allow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.core.parameters import family_of
from echelon.proof.claims.tolerance import own_tolerance
from echelon.proof.evidence.evidence import (
    FLOAT64_TOLERANCE,
    float64_tolerance,
    measured,
    tensor_errors,
)
from echelon.proof.evidence.fits import FLOOR
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout


def test_float64_has_one_tolerance() -> None:
    tolerance = float64_tolerance()
    assert FLOAT64_TOLERANCE == 1e-10
    assert tolerance.allowed("gradients", 0, "head.weight") == FLOAT64_TOLERANCE
    assert not tolerance.own_precision


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
