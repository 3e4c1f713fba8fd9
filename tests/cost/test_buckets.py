"""Buckets: every parameter of a stage once, in the order of backward, padded for the data ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.cost.buckets import FIRST_BUCKET_BYTES, plan_buckets, segment_order
from echelon.cost.stage import stage_parameters, stage_part
from tests.core.test_parameters import GPT2_SMALL
from tests.parallel.layouts import GPT2, NANO, QWEN, plan_of

PLANS = st.builds(
    plan_of,
    model=st.sampled_from((NANO, QWEN, GPT2)),
    pp=st.sampled_from((1, 2, 4)),
    dp=st.integers(1, 3),
    dp_shard=st.integers(1, 2),
    tp=st.sampled_from((1, 2)),
    sequence_parallel=st.booleans(),
    bucket_bytes=st.sampled_from((8, 1000, 4096, 2**20)),
    dtype=st.sampled_from(("fp32", "fp64")),
)


@given(PLANS)
@settings(deadline=None, max_examples=60)
def test_buckets_cover_each_parameter_once_and_are_padded(plan: Plan) -> None:
    for stage in range(plan.num_stages):
        part = stage_part(plan, stage)
        specs = {spec.name: spec for spec in stage_parameters(plan, part)}
        buckets = plan_buckets(plan, part)
        names = [name for bucket in buckets for name in bucket.names]
        assert sorted(names) == sorted(specs)
        assert [bucket.name for bucket in buckets] == [f"bucket{i}" for i in range(len(buckets))]
        for bucket in buckets:
            real = sum(specs[name].local_numel(plan.mesh.tp) for name in bucket.names)
            assert bucket.num_elements % plan.mesh.dp == 0
            assert 0 <= bucket.num_elements - real < plan.mesh.dp


def test_backward_completes_the_first_bucket_first() -> None:
    plan = plan_of(bucket_bytes=8)
    names = [bucket.names for bucket in plan_buckets(plan, stage_part(plan, 0))]
    assert names[0] == ("norm.weight", "head.weight")
    assert [{n.split(".")[1] for n in bucket} for bucket in names[1:5]] == [
        {"3"},
        {"2"},
        {"1"},
        {"0"},
    ]
    assert names[5:] == [("embedding.weight",)]
    assert names[1][:2] == ("layers.3.attention_norm.weight", "layers.3.attention.q.weight")


def test_one_bucket_holds_all_where_it_is_large_enough() -> None:
    plan = plan_of(bucket_bytes=2**24)
    assert len(plan_buckets(plan, stage_part(plan, 0))) == 1


@pytest.mark.parametrize("megabytes", [1, 25, 100])
def test_larger_buckets_are_fewer(megabytes: int) -> None:
    plan = plan_of(
        model=GPT2_SMALL, stages=(tuple(range(12)),), dtype="fp32",
        bucket_bytes=megabytes * 2**20,
    )  # fmt: skip
    buckets = plan_buckets(plan, stage_part(plan, 0))
    whole = [bucket.num_elements * 4 for bucket in buckets if bucket.kind == "whole"]
    block = 7_087_872 * 4
    assert all(size >= megabytes * 2**20 for size in whole[1:-1])
    assert all(size < megabytes * 2**20 + block for size in whole[1:-1])
    assert whole[0] >= min(FIRST_BUCKET_BYTES, megabytes * 2**20)
    assert len(buckets) < len(parameters(GPT2_SMALL))


def test_special_gradients_have_buckets_of_their_own() -> None:
    plan = plan_of(model=QWEN, pp=2, tp=2, sequence_parallel=True)
    kinds = [{b.kind: b.names for b in plan_buckets(plan, stage_part(plan, s))} for s in (0, 1)]
    assert kinds[0]["tied"] == kinds[1]["tied"] == ("embedding.weight",)
    assert "norm.weight" in kinds[1]["partial"]
    assert all("norm" in name for name in kinds[0]["partial"])


def test_what_decays_comes_first_and_keeps_its_order() -> None:
    specs = {spec.name: spec for spec in parameters(GPT2)}
    names = ["norm.bias", "layers.0.attention.q.weight", "norm.weight", "layers.0.mlp.up.weight"]
    assert segment_order(names, specs) == [names[1], names[3], names[0], names[2]]
