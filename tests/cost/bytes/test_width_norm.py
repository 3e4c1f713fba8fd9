"""Two numbers of each token travel in each pass of a norm over all heads, and its weight is cut."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from echelon.core.parameters import parameters
from echelon.core.plan import Plan, Recompute
from echelon.cost.bytes.model_sizes import block_weights
from echelon.cost.bytes.sent import bytes_sent
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from tests.parallel.layouts import NANO, plan_of

OLMO = replace(NANO, norm_place="after", qk_norm=True, qk_norm_over="width")


def sent(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return count and bytes of the terms of these norms."""
    return {
        term.name.removeprefix("norms of all heads "): (term.count, term.each)
        for term in bytes_sent(plan, 0)
        if term.name.startswith("norms of all heads")
    }


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 4), ("fp64", 8)])
def test_two_numbers_of_a_token_are_summed_in_each_pass(dtype: str, size: int) -> None:
    plan = plan_of(model=OLMO, tp=2, dtype=dtype)
    passes = OLMO.layers * plan.num_microbatches
    message = 2 * plan.local_tokens * size
    assert sent(plan) == {"forward": (passes, message), "backward": (passes, message)}
    assert sent(plan_of(model=OLMO, dtype=dtype)) == {}
    assert sent(plan_of(model=replace(OLMO, qk_norm_over="head"), tp=2, dtype=dtype)) == {}


@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        (Recompute(policy="selective", operators=("attention",)), 1.0),
        (Recompute(policy="selective", operators=("mlp",)), 0.0),
        (Recompute(policy="full", every=1), 1.0),
    ],
)
def test_they_travel_again_where_attention_is_made_again(
    recompute: Recompute, again: float
) -> None:
    plan = plan_of(model=OLMO, tp=2)
    plan = replace(plan, layout=replace(plan.layout, recompute=recompute))
    found = sent(plan)
    assert found.get("forward again", (0, 0))[0] == again * found["forward"][0]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_has_its_part_of_the_weight(tp: int) -> None:
    plan = plan_of(model=OLMO, tp=tp)
    specs = [one for one in parameters(OLMO) if one.layer == 0]
    held = sum(prod(one.shape) // (1 if one.split_dim is None else tp) for one in specs)
    work = cost_inputs_from_plan(plan)
    assert float(block_weights(work.model, work.layout, mixture=False)[0]) == held
    assert {one.name: one.split_dim for one in specs}["layers.0.attention.q_norm.weight"] == 0
