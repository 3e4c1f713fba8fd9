"""The Plan: JSON round trip, its hash, and what follows from its numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.model_shape import Experts, LatentAttention, RopeScaling
from echelon.core.plan import Plan, Precision, Recompute, Zero
from tests.cost.layouts import zero_plan, zero_plans
from tests.parallel.layouts import GPT2, NANO, QWEN, plan_of
from tests.walks import examples

SHAPES = (
    NANO,
    GPT2,
    QWEN,
    replace(
        NANO,
        rope_scaling=RopeScaling(
            factor=8.0,
            low_frequency_factor=1.0,
            high_frequency_factor=4.0,
            original_positions=8192,
        ),
        experts=Experts(num_experts=8, top_k=2, ffn=8, router="sigmoid", router_bias=True),
        latent=LatentAttention(query_rank=8, kv_rank=4, nope_dim=2, rope_dim=2, value_dim=4),
    ),
)

PLANS = st.builds(
    plan_of,
    model=st.sampled_from(SHAPES),
    pp=st.sampled_from((1, 2, 4)),
    dp=st.sampled_from((1, 2)),
    tp=st.sampled_from((1, 2)),
    microbatches=st.integers(1, 5),
    recompute=st.builds(
        Recompute, policy=st.sampled_from(("none", "full")), every=st.integers(1, 3)
    ),
)


@given(PLANS | zero_plans())
@settings(deadline=None, max_examples=examples(60))
def test_a_plan_survives_json(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.content_hash() == plan.content_hash()


def test_a_plan_is_read_from_its_file(tmp_path: Path) -> None:
    plan = plan_of()
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    assert Plan.read(path) == plan


@pytest.mark.parametrize(
    "other",
    [
        plan_of(tp=2),
        plan_of(bucket_bytes=1),
        plan_of(model=QWEN),
        replace(plan_of(), name="other"),
        zero_plan(1),
        plan_of(zero=Zero(accumulate="slices")),
        plan_of(zero=Zero(offload_dir="x")),
        plan_of(precision=Precision(parameters="bf16")),
        plan_of(recompute=Recompute(policy="full", offload="host")),
    ],
)
def test_any_change_gives_another_hash(other: Plan) -> None:
    assert other.content_hash() != plan_of().content_hash()


def test_layout_is_not_mathematics() -> None:
    plan = plan_of(microbatches=4)
    other = plan_of(microbatches=2, dp=2, tp=2, sequence_parallel=True, pp=2, schedule="gpipe")
    assert plan.same_mathematics(other)
    assert plan != other
    assert not plan.same_mathematics(plan_of(microbatches=4, dtype="fp32"))


def test_zero_is_layout_and_precision_is_mathematics() -> None:
    plan = plan_of(dp_shard=2)
    assert plan.same_mathematics(plan_of(dp_shard=2, zero=Zero(stage=3, optimizer_offload="host")))
    assert not plan.same_mathematics(plan_of(dp_shard=2, precision=Precision(reduction="bf16")))


def test_a_master_copy_is_there_where_it_has_another_dtype() -> None:
    assert not Precision().has_master
    assert Precision(parameters="bf16").has_master
    assert not Precision(parameters="bf16", master="bf16").has_master


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 1}, "plan schema 1; this version reads schema 8"),
        ({"schema": None}, "plan schema None"),
        ({"nmae": 1}, r"plan: unknown entries \['nmae'\]"),
        ({"layout": []}, "plan.layout: expected a table"),
    ],
)
def test_what_is_not_a_plan_is_refused(change: dict[str, Any], message: str) -> None:
    data = json.loads(plan_of().to_json())
    with pytest.raises(ValueError, match=message):
        Plan.from_json(json.dumps({**data, **change}))


@pytest.mark.parametrize("text", ["[]", "3", "null"])
def test_json_that_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="plan schema None"):
        Plan.from_json(text)


def test_truncated_json_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        Plan.from_json(plan_of().to_json()[:-40])


@given(
    microbatch=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    replicas=st.integers(1, 4),
    shards=st.integers(1, 4),
)
@settings(deadline=None, max_examples=examples(40))
def test_the_global_batch_is_microbatch_times_accumulation_times_replicas(
    microbatch: int, accumulation: int, replicas: int, shards: int
) -> None:
    plan = plan_of(
        microbatch_sequences=microbatch, microbatches=accumulation, dp=replicas, dp_shard=shards
    )
    assert plan.mathematics.global_sequences == microbatch * accumulation * replicas * shards
    assert plan.num_microbatches == accumulation
    assert plan.tokens_per_step == plan.mathematics.global_sequences * 8


@pytest.mark.parametrize(
    ("policy", "every", "expected"),
    [
        ("none", 1, []),
        ("full", 1, [0, 1, 2, 3, 4]),
        ("full", 2, [0, 2, 4]),
        ("selective", 1, []),
    ],
)
def test_which_blocks_are_recomputed(policy: Any, every: int, expected: list[int]) -> None:
    recompute = Recompute(policy=policy, every=every)
    assert [layer for layer in range(5) if recompute.recomputes(layer)] == expected
