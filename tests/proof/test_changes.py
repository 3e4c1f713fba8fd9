"""Numbers of a plan that a proof changes are listed, and no division is mended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from echelon.core.errors import ConfigError
from echelon.core.model_shape import Experts
from echelon.core.plan import Plan, Precision
from echelon.proof.changes import changes, relations, require_nothing_mended
from echelon.proof.run import prove
from echelon.proof.shrink import shrink
from tests.parallel.layouts import NANO, plan_of

MIXTURE = replace(NANO, experts=Experts(num_experts=8, top_k=2, ffn=24))


def no_ranks(target: str, argument: object, world_size: int, /, **_: object) -> None:
    """Start no rank: what is refused needs none."""
    del argument
    raise AssertionError(f"{world_size} ranks of {target} were started")


def with_model(plan: Plan, **fields: Any) -> Plan:
    model = replace(plan.model, **fields)
    return replace(plan, mathematics=replace(plan.mathematics, model=model))


def with_experts(plan: Plan, **fields: Any) -> Plan:
    assert plan.model.experts is not None
    return with_model(plan, experts=replace(plan.model.experts, **fields))


def with_numbers(plan: Plan, **fields: Any) -> Plan:
    return replace(plan, mathematics=replace(plan.mathematics, **fields))


def with_stages(plan: Plan, *stages: tuple[int, ...]) -> Plan:
    pipeline = replace(plan.layout.pipeline, stages=stages)
    return replace(plan, layout=replace(plan.layout, pipeline=pipeline))


ILLEGAL: dict[str, tuple[Callable[[], Plan], Callable[[Plan], Plan]]] = {
    "tp divides heads": (
        lambda: plan_of(tp=4, model=replace(NANO, heads=4, kv_heads=4)),
        lambda plan: with_model(plan, heads=6, kv_heads=6),
    ),
    "kv_heads divides heads": (
        lambda: plan_of(model=replace(NANO, heads=4, kv_heads=2)),
        lambda plan: with_model(plan, heads=5),
    ),
    "2 divides the width of a head": (plan_of, lambda plan: with_model(plan, head_dim=5)),
    "chunks of context ranks divides sequence_length": (
        lambda: plan_of(cp=2),
        lambda plan: with_numbers(plan, sequence_length=18),
    ),
    "learned positions hold sequence_length": (
        lambda: plan_of(model=replace(NANO, positions="learned")),
        lambda plan: with_model(plan, max_positions=3),
    ),
    "dp x microbatch_sequences divides global_sequences": (
        lambda: plan_of(dp=2),
        lambda plan: with_numbers(plan, global_sequences=plan.mathematics.global_sequences + 1),
    ),
    "ep divides num_experts": (
        lambda: plan_of(model=MIXTURE, dp_shard=2, ep=2),
        lambda plan: with_experts(plan, num_experts=7),
    ),
    "experts that a token may be routed to hold top_k": (
        lambda: plan_of(model=MIXTURE),
        lambda plan: with_experts(plan, num_experts=2, top_k=3),
    ),
    "stages have each block once, in order": (
        lambda: plan_of(pp=2),
        lambda plan: with_stages(plan, (0, 1), (1,)),
    ),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_what_does_not_fit_is_refused_and_not_mended(name: str) -> None:
    legal, broken = ILLEGAL[name]
    require_nothing_mended(legal(), shrink(legal()))
    plan = broken(legal())
    assert not {relation.name: relation.holds for relation in relations(plan)}[name]
    with pytest.raises(ConfigError) as raised:
        prove(plan, run_ranks=no_ranks)
    assert set(raised.value.rules) == {"prove-repairs-nothing"}
    assert any(problem.message.startswith(f"{name}: ") for problem in raised.value.problems)


def test_widths_of_blocks_with_a_scale_are_among_the_relations() -> None:
    plan = plan_of(tp=2, precision=Precision(matmul="fp8", fp8_block=7))
    holds = {relation.name: relation.holds for relation in relations(plan)}
    assert not holds["fp8_block divides hidden"]
    assert {name for name in holds if "fp8_block" in name} == {
        "fp8_block divides hidden",
        "tp x fp8_block divides heads x head_dim",
        "tp x fp8_block divides kv_heads x head_dim",
        "tp x fp8_block divides ffn",
    }


def test_every_number_that_is_another_one_is_told() -> None:
    plan = plan_of(pp=2)
    small = with_stages(with_model(plan, hidden=3, name="small"), (0,), (1,))
    numbers = {change.name: (change.given, change.proven) for change in changes(plan, small)}
    stages = plan.layout.pipeline.stages
    assert numbers == {
        "model.hidden": (plan.model.hidden, 3),
        **({"pipeline.stages": (stages, ((0,), (1,)))} if stages != ((0,), (1,)) else {}),
    }
    assert changes(plan, plan) == ()
