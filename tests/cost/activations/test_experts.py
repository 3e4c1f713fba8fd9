"""What a mixture of experts keeps, by hand."""

from __future__ import annotations

from dataclasses import replace

from echelon.cost.activations.expert_numbers import expert_numbers
from echelon.cost.activations.experts import DISPATCH, mixture_operators, mixture_saved
from echelon.cost.activations.numbers import activation_numbers_from_plan, total_saved_bytes
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of

PLAN = plan_of(model=MIXTRAL, dtype="fp32")
X, E = activation_numbers_from_plan(PLAN), expert_numbers(PLAN, 0)


def test_a_mixture_by_hand() -> None:
    # 8 tokens, two of eight experts for each, 12 wide inside: 16 rows.
    found = {(one.operator, one.name): one.bytes for one in mixture_saved(X, E) if one.bytes}
    assert found == {
        ("mlp norm", "residual stream"): 8 * 16 * 4,
        ("mlp norm", "statistics"): 8 * 4,
        ("router", "mlp input"): 8 * 16 * 4,
        ("router", "scores"): 8 * 8 * 4,
        ("router", "choices"): 8 * 2 * 8,
        ("router", "gates and their sum"): 8 * 3 * 4,
        ("experts", "rows"): 16 * 16 * 4,
        ("experts", "gates"): 16 * 4,
        ("experts", "gate and up"): 16 * 2 * 12 * 4,
    }


def test_losses_keep_scores_once_more() -> None:
    base = total_saved_bytes(mixture_saved(X, E))
    by_sequence = total_saved_bytes(mixture_saved(X, replace(E, auxiliary=1, by_sequence=1)))
    assert by_sequence - base == 8 * 8 * 4
    z_loss = total_saved_bytes(mixture_saved(X, replace(E, z_loss=1)))
    assert z_loss - base == 8 * (8 + 1) * 4


def test_experts_that_every_token_meets_are_an_mlp_beside() -> None:
    plan = plan_of(model=DEEPSEEK, dtype="fp32")
    numbers = expert_numbers(plan, 0)
    found = mixture_saved(activation_numbers_from_plan(plan), numbers)
    shared = {one.name: one.bytes for one in found if one.operator == "shared experts"}
    kept = {"gate and up": 8 * 2 * 12 * 4, "inner activation": 8 * 12 * 4}
    assert shared == {"input in 8 bits": 0, **kept}


def test_operators_keep_what_is_told_and_where_rows_go() -> None:
    operators = mixture_operators(X, E)
    places = {one.name: one.saved_bytes for one in operators}[DISPATCH]
    kept = sum(one.saved_bytes for one in operators)
    assert places == E.places > 0
    assert kept == total_saved_bytes(mixture_saved(X, E)) + places
