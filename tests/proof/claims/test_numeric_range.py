"""Cases at the ends of a narrow dtype: which there are, and what is judged of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.proof.claims.numeric_range import SMALL, NumbersOfThree, judge_ranges, range_cases
from echelon.proof.ranks import ObservedActivation
from echelon.proof.shrink import shrink
from tests.proof.layouts import BF16, FP16, Changes, layout
from tests.proof.replicas import replicas


@pytest.mark.parametrize("precision", [BF16, FP16])
def test_one_device_has_numbers_in_the_largest_case(precision: Changes) -> None:
    own = shrink(layout(precision=precision))
    large, small = range_cases(own)
    assert large.factor >= 4
    assert small.factor == SMALL
    assert large.plan.model.initial_std == large.factor * own.model.initial_std


def test_a_plan_of_many_digits_has_no_such_cases() -> None:
    assert not range_cases(shrink(layout()))


@pytest.mark.parametrize(("value", "says"), [(float("inf"), "overflow"), (0.0, "are zero")])
def test_what_overflows_or_vanishes_is_found(value: float, says: str) -> None:
    case = range_cases(shrink(layout(precision=BF16)))[0]

    def changed(one: ObservedActivation) -> ObservedActivation:
        if one.name != "layers.1.mlp" or one.gradient:
            return one
        return replace(one, values_nW=torch.full_like(one.values_nW, value))

    right = replicas(case.plan).run
    wrong = replicas(case.plan, activation=changed).run
    assert judge_ranges([(case, right)]).holds
    (failure,) = judge_ranges([(case, wrong)]).failures
    assert failure.subject == "layers.1.mlp"
    assert f"with weights {case.factor:g} times as large" in failure.detail
    assert says in failure.detail


def test_a_zero_is_missed_in_the_place_of_a_number_that_means_something_only() -> None:
    exact = torch.tensor([[1.0, 2.0, 1e-40], [3.0, -4.0, 0.0]], dtype=torch.float64)
    rough = torch.tensor([[1.1, 0.0, 2e-8], [3.0, -4.0, -3e-8]])
    seen = torch.tensor([[0.0, 2.1, 0.0], [3.0, 0.0, 0.0]])
    assert NumbersOfThree("x", seen, rough, exact).more_zeros().tolist() == [0.0, 1.0]
    assert NumbersOfThree("x", rough, rough, exact).more_zeros().tolist() == [0.0, 0.0]
