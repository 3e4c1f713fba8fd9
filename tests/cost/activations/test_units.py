"""The units of a stage, and what embedding and head keep, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.core.plan import Plan, Recompute, RecomputedOperator
from echelon.cost.activations.numbers import activation_numbers_from_plan, total_saved_bytes
from echelon.cost.activations.timeline import RankActivations
from echelon.cost.activations.units import (
    UnitOperators,
    block_operators,
    embedding_operators,
    head_operators,
    stage_unit_operators,
)
from echelon.layout.buckets import UNIT_EMBEDDING, UNIT_HEAD
from echelon.layout.stage import rank_part
from tests.parallel.layouts import DEEPSEEK, GPT2, NANO, plan_of

PLACE = (0, 0, None)


def _units(plan: Plan, pp_rank: int = 0) -> tuple[UnitOperators, ...]:
    x = activation_numbers_from_plan(plan)
    return stage_unit_operators(plan, rank_part(plan, pp_rank).stages[0], x, PLACE)


def test_ends_by_hand() -> None:
    x = activation_numbers_from_plan(plan_of(model=GPT2, tp=2, dtype="bf16"))
    ids, positions, dropped = (one.saved_bytes for one in embedding_operators(x))
    assert (ids, positions, dropped) == (8 * (8 + 1), 8 * 8, 0)
    (loss,) = (one for one in head_operators(x) if one.name == "loss")
    assert {one.name: one.bytes for one in loss.saved} == {"input": 8 * 16 * 2}
    # Of a vocabulary of 37 each of two ranks has 19.
    assert {one.name: one.bytes for one in loss.kept_for_weight_gradient} == {
        "gradients of logits": 8 * 19 * 2,
        "input, weighted": 8 * 16 * 2,
    }


def test_units_of_a_stage_are_its_blocks_and_ends() -> None:
    blocks = [f"layers.{layer}" for layer in range(4)]
    assert [one.name for one in _units(plan_of())] == [UNIT_EMBEDDING, *blocks, UNIT_HEAD]
    plan = plan_of(pp=2)
    assert [one.name for one in _units(plan)] == [UNIT_EMBEDDING, *blocks[:2]]
    assert [one.name for one in _units(plan, 1)] == [*blocks[2:], UNIT_HEAD]


def test_a_recomputed_block_keeps_its_input_on_the_device_or_on_the_host() -> None:
    changes: dict[str, Any] = {"pp": 2, "recompute": Recompute(policy="full")}
    plan = plan_of(**changes)
    x = activation_numbers_from_plan(plan)
    assert [[one.bytes for one in unit.saved] for unit in _units(plan)[1:]] == [[x.stream]] * 2
    changes["recompute"] = Recompute(policy="full", offload="host")
    first, *others = _units(plan_of(**changes), 1)
    # Nothing on the device would keep the input of the stage, but the executor has it.
    assert (first.name, first.operators) == ("input", ())
    assert [unit.saved for unit in others[:2]] == [(), ()]
    assert all(unit.on_host for unit in others[:2])


def test_blocks_of_a_mixture_route_but_for_the_first() -> None:
    plan = plan_of(model=DEEPSEEK)
    x = activation_numbers_from_plan(plan)
    names = [{one.name for one in block_operators(plan, x, layer, PLACE)} for layer in (0, 1)]
    assert "router" not in names[0]
    assert {"router", "dispatch", "shared experts", "experts"} <= names[1]
    assert {"attention dropout", "mlp dropout"} <= names[0] & names[1]


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
