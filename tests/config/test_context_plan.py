"""A plan that was changed by hand is refused as its settings would be, before any rank starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.config.effects import require_trainable
from echelon.config.load import load_job
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
        (cut(RING, Context(ulysses_degree=2)), "ulysses-divides-cp", ["'ring'", "works here: 1"]),
        (cut(RING, Context(ulysses_degree=8)), "ulysses-divides-cp", ["cp = 4"]),
        (cut(RING, Context(kind="ulysses")), "ulysses-divides-cp", ["works here: 4"]),
        (
            cut(RING, Context(kind="ulysses-ring", ulysses_degree=3)),
            "ulysses-divides-cp",
            ["works here: 1, 2, 4"],
        ),
        (
            cut(RING, Context(kind="ulysses", ulysses_degree=8), cp=8),
            "ulysses-divides-heads",
            ["4 % 8 = 4"],
        ),
        (
            cut(RING, Context(kind="striped"), length=132, tp=2),
            "sequence-parallel-divides-sequence",
            ["33 % 2 = 1", "136"],
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
