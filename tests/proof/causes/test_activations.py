"""The first wrong activation is named: where, and in which way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from echelon.proof.causes.activations import (
    backward_place,
    describe_boundary,
    explain_backward,
    tensor_at,
)
from echelon.proof.causes.diagnose import diagnose
from echelon.proof.causes.finding import Diagnosis, ProofFinding
from echelon.proof.claims.claims import judge
from echelon.proof.ranks import ObservedActivation
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout
from tests.proof.replicas import replicas

PLAN = shrink(layout(dp=2), precision="fp64")
SITE = "layers.1.mlp"


def told(change: Callable[[torch.Tensor], torch.Tensor], rank: int | None = None) -> Diagnosis:
    """Return what is told where what the MLP of block 1 gives is changed."""

    def changed(one: ObservedActivation) -> ObservedActivation:
        if (one.name, one.gradient) != (SITE, False) or rank not in (None, one.rank):
            return one
        return replace(one, values_nW=change(one.values_nW))

    evidence = replicas(PLAN, activation=changed)
    found = diagnose(evidence, judge(evidence))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        (lambda x: 1.1 * x, "number"),
        (lambda x: -x, "sign"),
        (lambda x: 0 * x, "zero"),
        (lambda x: x.roll(1, 0), "another token's"),
        (lambda x: x.roll(1, 1), "columns permuted"),
        (lambda x: x @ torch.linalg.qr(torch.randn(x.shape[1], x.shape[1]).double())[0], "rotated"),
        (lambda x: x * torch.nan, "not finite"),
        (lambda x: x.abs() + 0.1 * x.square(), "none"),
    ],
)
def test_the_way_in_which_it_is_wrong_is_named(
    change: Callable[[torch.Tensor], torch.Tensor], factor: str
) -> None:
    found = told(change)
    assert (found.rule, found.tensor, found.factor) == ("prove-activations", SITE, factor)
    assert "first wrong in the output of mlp of block 1" in found.says
    assert "right in the output of mlp_norm of block 1" in found.says


def test_a_factor_on_one_rank_points_to_its_axis() -> None:
    found = told(lambda x: 1.1 * x, rank=1)
    assert (found.axis, found.ranks) == ("dp", (1,))
    assert found.value == pytest.approx(1.1)


def test_boundaries_have_words_and_parts() -> None:
    assert describe_boundary("layers.3.scores") == "the scores of the router of block 3"
    assert describe_boundary("norm") == "the output of the last norm"
    assert tensor_at("layers.0.input") == "embedding"
    assert tensor_at("layers.2.input") == tensor_at("layers.2.output") == "layers.2"
    assert tensor_at("layers.2.gates") == "layers.2.mlp.router"


def test_a_backward_pass_is_placed_where_its_gradient_is_first_wrong() -> None:
    def changed(one: ObservedActivation) -> ObservedActivation:
        before = one.name.startswith("layers.0.") or one.name == "layers.1.attention_norm"
        return replace(one, values_nW=-one.values_nW) if before and one.gradient else one

    place = backward_place(replicas(PLAN, activation=changed), 0)
    assert place is not None
    assert place[0] == "layers.1.attention_norm"
    assert place[1].endswith("right in that of the output of attention of block 1")


def of_gradients(change: Callable[[torch.Tensor], torch.Tensor]) -> ProofFinding:
    """Return what is told where the gradient of what the MLP of block 1 gives is changed."""

    def changed(one: ObservedActivation) -> ObservedActivation:
        here = (one.name, one.gradient) == (SITE, True)
        return replace(one, values_nW=change(one.values_nW)) if here else one

    found = explain_backward(replicas(PLAN, activation=changed), 0)
    assert found is not None
    assert found.tensor == SITE
    assert "first wrong in the gradient of the output of mlp of block 1" in found.description
    return found


def test_a_function_of_the_right_gradient_is_told_with_its_coefficients() -> None:
    squared = of_gradients(lambda dy: dy + 10 * dy * dy)
    assert squared.factor == "not linear"
    assert "it is 1 x the right gradient + 10 x its square: no linear" in squared.description
    assert of_gradients(lambda dy: dy + 1e-3).factor == "not linear"
    assert of_gradients(lambda dy: 2 * dy).value == pytest.approx(2.0)
    assert of_gradients(lambda dy: dy.roll(1, 1)).factor == "none"
    some = of_gradients(lambda dy: torch.cat((dy[:, :-2], dy[:, -2:].roll(1, 0)), 1))
    assert some.factor == "slice"
    assert some.description.startswith("in columns 22:24 only")
    assert explain_backward(replicas(PLAN), 0) is None
