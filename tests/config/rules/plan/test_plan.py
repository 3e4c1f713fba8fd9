"""A plan that was changed by hand is refused as its settings would be, before any rank starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.config.load import load_job
from echelon.config.rules.finders import plan_problems, require_trainable
from echelon.core.errors import InfeasiblePlan
from echelon.core.plan import Context, Plan

RING = load_job("nano", ["mesh.cp=4"]).plan


def cut(plan: Plan, context: Context, *, length: int = 128, tp: int = 1, cp: int = 4) -> Plan:
    """Return the plan with its sequences cut another way."""
    layout = replace(
        plan.layout,
        context=context,
        mesh=replace(plan.mesh, cp=cp, tp=tp),
        sequence_parallel=tp > 1,
    )
    return replace(
        plan, layout=layout, mathematics=replace(plan.mathematics, sequence_length=length)
    )


@pytest.mark.parametrize(
    ("plan", "rule", "words"),
    [
        (cut(RING, Context(), length=126), "context-divides-sequence", ["126 % 4 = 2", "128"]),
        (cut(RING, Context(), length=132), "context-divides-sequence", ["132 % 8 = 4", "136"]),
        (
            cut(RING, Context(ulysses_degree=2)),
            "ulysses-divides-cp",
            ['"ring"', "context.ulysses_degree = 1"],
        ),
        (cut(RING, Context(ulysses_degree=8)), "ulysses-divides-cp", ["cp = 4"]),
        (
            cut(RING, Context(kind="ulysses")),
            "ulysses-divides-cp",
            ["context.ulysses_degree = 4"],
        ),
        (
            cut(RING, Context(kind="ulysses-ring", ulysses_degree=3)),
            "ulysses-divides-cp",
            ["context.ulysses_degree = 2 or context.ulysses_degree = 4"],
        ),
        (
            cut(RING, Context(kind="ulysses", ulysses_degree=8), cp=8),
            "ulysses-divides-heads",
            ["4 % 8 = 4"],
        ),
        (
            cut(RING, Context(kind="striped"), length=132, tp=2),
            "sequence-parallel-divides-sequence",
            ["4 x 2 = 8 (132 % 8 = 4)", "136"],
        ),
    ],
)
def test_a_changed_plan_is_refused(plan: Plan, rule: str, words: list[str]) -> None:
    with pytest.raises(InfeasiblePlan) as caught:
        require_trainable(plan)
    assert caught.value.rules == (rule,)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "plan",
    [
        RING,
        cut(RING, Context(kind="striped"), length=132),
        cut(RING, Context(kind="ulysses", ulysses_degree=4), length=132),
        cut(RING, Context(kind="ulysses-ring", ulysses_degree=2), length=132),
        cut(RING, Context(), length=136, cp=2, tp=2),
    ],
)
def test_what_divides_is_trainable(plan: Plan) -> None:
    require_trainable(plan)


def shaped(**shape: Any) -> Plan:
    model = replace(RING.model, **shape)
    return replace(RING, mathematics=replace(RING.mathematics, model=model))


def documented(word: Any) -> Plan:
    return replace(RING, mathematics=replace(RING.mathematics, documents=word))


def kind_of(word: Any) -> Plan:
    return cut(RING, Context(kind=word))


@pytest.mark.parametrize(
    ("plan", "rule", "key", "words"),
    [
        (shaped(window=0), "out-of-range", "model.window", ["= 0 is below 1", 'here: 1 or "none"']),
        (shaped(window=-3), "out-of-range", "model.window", ["= -3 is below 1", 'or "none"']),
        (shaped(window=2.5), "wrong-type", "model.window", ["a number with a fraction"]),
        (shaped(window="wide"), "wrong-type", "model.window", ["is a string"]),
        (shaped(soft_cap=0.0), "out-of-range", "model.soft_cap", ["above 0", 'here: "none"']),
        (shaped(soft_cap=-1.0), "out-of-range", "model.soft_cap", ["= -1.0"]),
        (shaped(soft_cap=float("nan")), "out-of-range", "model.soft_cap", ["= nan"]),
        (shaped(causal="no"), "wrong-type", "model.causal", ['= "no"', "true or false"]),
        (shaped(causal=None), "wrong-type", "model.causal", ["= None"]),
        (kind_of("rings"), "unknown-choice", "context.kind", ['mean "ring"', '"ulysses-ring"']),
        (kind_of(None), "wrong-type", "context.kind", ["= None"]),
        (documented("apart"), "unknown-choice", "batch.documents", ['"joined" or "separate"']),
    ],
)
def test_a_value_of_no_setting_is_refused(
    plan: Plan, rule: str, key: str, words: list[str]
) -> None:
    with pytest.raises(InfeasiblePlan) as caught:
        require_trainable(plan)
    assert [(problem.rule, problem.key) for problem in caught.value.problems] == [(rule, key)]
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("block", "gather"), [(32, "parameters"), (0, "int8")])
def test_a_plan_that_rounds_gathers_in_int8(block: int, gather: Any) -> None:
    """int8-gather-of-all: the mathematics round matrices where the layout gathers them so."""
    precision = replace(RING.mathematics.precision, int8_block=block)
    zero = replace(RING.layout.zero, stage=3, gather=gather)
    plan = replace(
        RING,
        mathematics=replace(RING.mathematics, precision=precision),
        layout=replace(RING.layout, zero=zero),
    )
    assert "int8-gather-of-all" in {problem.rule for problem in plan_problems(plan)}


def test_a_mask_that_settings_can_make_is_trainable() -> None:
    require_trainable(shaped(window=1, soft_cap=30, causal=False))
    require_trainable(documented("separate"))
