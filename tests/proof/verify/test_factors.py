"""Factors, norms and axes of the user's mesh."""

from __future__ import annotations

import pytest

from echelon.proof.verify.factors import (
    name_partial_norm,
    named,
    place_of_parameter,
    telling_axis,
)
from echelon.proof.verify.named_mesh import NamedMesh
from tests.proof.verify.captures import evidence_of


def test_a_factor_is_named_by_the_axes_that_have_it() -> None:
    evidence = evidence_of({})
    step = evidence.reference.steps[0]
    assert named(evidence, step, 2.0).factor == "dp"
    assert (named(evidence, step, 0.5).factor, named(evidence, step, 0.5).axis) == ("1/dp", "dp")
    assert named(evidence, step, 1.7).factor == "number"


def test_the_axis_is_where_wrong_and_right_have_no_place_in_common() -> None:
    mesh = NamedMesh({"dp": 2, "tp": 2})
    assert telling_axis(mesh, {0, 2}, range(4)) == "tp"
    assert telling_axis(mesh, {2, 3}, range(4)) == "dp"
    assert telling_axis(mesh, {1, 2}, range(4)) == ""


def test_a_partial_norm_says_of_what() -> None:
    evidence = evidence_of({})
    step = evidence.reference.steps[0]
    found = name_partial_norm(evidence, step, step.grad_norm * 2**0.5)
    assert found is not None
    assert found.description.startswith(f"{step.grad_norm * 2**0.5:.6g} is the norm of all that")
    assert (found.axis, found.value) == ("dp", pytest.approx(2**0.5))
    assert name_partial_norm(evidence, step, step.grad_norm) is None


def test_where_a_parameter_lies_is_told() -> None:
    assert place_of_parameter(evidence_of({}), "w") == "copies over dp"
    assert place_of_parameter(evidence_of({}), "loss") == ""
