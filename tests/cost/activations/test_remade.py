"""What a block keeps where operators of it are made again: the bytes that each leaves out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.plan import Recompute, RecomputedOperator
from echelon.cost.activations.from_plan import activation_numbers_from_plan
from echelon.cost.activations.operator_memory import total_saved_bytes
from echelon.cost.activations.timeline import RankActivations
from tests.parallel.layouts import DEEPSEEK, NANO, plan_of


def kept(*operators: RecomputedOperator, model: object = NANO) -> int:
    """Return the bytes that the second block keeps in float64."""
    plan = plan_of(model=model, recompute=Recompute(policy="selective", operators=operators))
    unit = next(u for u in RankActivations(plan, 0).units(0, 0) if u.name == "layers.1")
    return int(total_saved_bytes(unit.saved))


@pytest.mark.parametrize("operator", ["norm", "activation", "mlp", "attention"])
def test_an_operator_leaves_out_what_it_makes(operator: RecomputedOperator) -> None:
    x = activation_numbers_from_plan(plan_of())
    inner, statistics = 8 * 24 * 8, 8 * 8
    wanted = {
        "norm": 2 * (x.stream + statistics),
        "activation": inner,
        "mlp": 3 * inner,
        # Turned queries and keys, the output, and its log-sum-exp of four heads.
        "attention": 2 * x.queries + x.keys + 4 * statistics,
    }
    assert kept() - kept(operator) == wanted[operator]


def test_of_a_mixture_the_norm_of_attention_and_attention_are_made_again() -> None:
    assert kept("mlp", model=DEEPSEEK) == kept(model=DEEPSEEK)
    x = activation_numbers_from_plan(plan_of(model=DEEPSEEK))
    assert kept(model=DEEPSEEK) - kept("norm", model=DEEPSEEK) == x.stream + 8 * 8


def test_a_whole_block_keeps_its_input_alone() -> None:
    plan = plan_of(recompute=Recompute(policy="full", operators=("norm",)))
    first = RankActivations(plan, 0).units(0, 0)
    layout = replace(plan.layout, recompute=Recompute(policy="full"))
    assert first == RankActivations(replace(plan, layout=layout), 0).units(0, 0)
