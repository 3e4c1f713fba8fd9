"""The numbers of adapters are those of the table of parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.choices.lora import LINEARS, Lora
from echelon.core.parameters import num_parameters, num_trained_parameters
from echelon.cost.peak.fullest_rank import pipeline_ends
from echelon.cost.seconds.adapters import with_adapters
from echelon.cost.seconds.from_plan import cost_inputs_from_plan, model_numbers_from_shape
from tests.parallel.layouts import NANO, plan_of

SHAPE = replace(NANO, lora=Lora(rank=4, alpha=8.0, targets=LINEARS))


def test_a_shape_without_adapters_keeps_its_numbers() -> None:
    numbers = model_numbers_from_shape(NANO, 8)
    assert with_adapters(numbers, NANO) is numbers


def test_rows_and_weights_are_those_of_the_parameters() -> None:
    found = with_adapters(model_numbers_from_shape(SHAPE, 8), SHAPE)
    assert (found.adapters_attention_in, found.adapters_mlp_out) == (12.0, 4.0)
    each = float(found.adapters_whole) + float(found.adapters_split)
    assert each * SHAPE.layers == num_trained_parameters(SHAPE)
    assert found.trained == pytest.approx(num_trained_parameters(SHAPE) / num_parameters(SHAPE))


def test_a_rank_holds_all_weights_and_trains_adapters_alone() -> None:
    held = pipeline_ends(cost_inputs_from_plan(plan_of(model=SHAPE))).last
    assert float(held.shared) == num_parameters(SHAPE)
    assert float(held.trained) == num_trained_parameters(SHAPE)
