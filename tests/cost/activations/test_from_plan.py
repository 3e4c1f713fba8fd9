"""The forms of a block are flags of the numbers of its plan."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.model_shape import Multipliers
from echelon.cost.activations.numbers import activation_numbers_from_plan
from tests.parallel.layouts import NANO, plan_of


def test_forms_of_blocks_are_flags() -> None:
    x = activation_numbers_from_plan(plan_of(dtype="fp32"))
    assert (x.norm_before, x.norm_after, x.parallel, x.one_norm) == (1, 0, 0, 0)
    assert (x.multiplied, x.apart, x.of_attention.apart, x.around) == (0, 0, 0, x.stream)
    model = replace(NANO, multipliers=Multipliers(residual=0.5), norm_place="both")
    x = activation_numbers_from_plan(plan_of(model=model, dtype="fp32"))
    assert (x.norm_before, x.norm_after, x.multiplied, x.apart) == (1, 1, 1, 1)
    model = replace(NANO, residual="parallel")
    x = activation_numbers_from_plan(plan_of(model=model, dtype="fp32"))
    assert (x.apart, x.of_attention.apart, x.of_attention.around) == (0, 1, x.stream)
    x = activation_numbers_from_plan(
        plan_of(model=replace(model, residual="parallel-one-norm"), dtype="fp32")
    )
    assert (x.apart, x.of_attention.apart, x.of_attention.around) == (0, 0, 2 * x.stream)
