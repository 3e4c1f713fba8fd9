"""Buckets: every parameter of a stage once, in the order of backward, padded for the data ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from echelon.core.axis import LOSS_AXES
from echelon.core.model_shape import LatentAttention
from echelon.core.parameters import parameters
from echelon.core.plan import Optimizer, Plan, Zero, ZeroStage
from echelon.layout.buckets import (
    FIRST_BUCKET_BYTES,
    BucketPlan,
    fp8_group_of,
    fp8_groups,
    plan_buckets,
    segment_order,
    shard_degree,
    slice_elements,
    stage_units,
    unit_of,
    variables_of,
)
from echelon.layout.stage import held_parameters, rank_part, update_rule_of
from tests.core.test_parameters import GPT2_SMALL
from tests.cost.layouts import zero_plan, zero_plans
from tests.parallel.layouts import DEEPSEEK, GPT2, MIXTRAL, NANO, QWEN, plan_of
from tests.walks import examples


def buckets_of(plan: Plan, stage: int = 0) -> tuple[BucketPlan, ...]:
    return plan_buckets(plan, rank_part(plan, stage))


@given(zero_plans())
@settings(deadline=None, max_examples=examples(80))
def test_buckets_cover_each_parameter_once_and_are_padded(plan: Plan) -> None:
    data = plan.mesh.degree(*LOSS_AXES)
    for stage in range(plan.num_stages):
        part = rank_part(plan, stage)
        specs = {spec.name: spec for spec in held_parameters(plan, part)}
        buckets = plan_buckets(plan, part)
        names = [name for bucket in buckets for name in bucket.names]
        assert sorted(names) == sorted(specs)
        assert [bucket.name for bucket in buckets] == [f"bucket{i}" for i in range(len(buckets))]
        for bucket in buckets:
            real = sum(specs[name].local_numel(plan.mesh.tp) for name in bucket.names)
            assert bucket.num_elements % data == 0
            assert 0 <= bucket.num_elements - real < data
            assert slice_elements(plan, bucket) * shard_degree(plan) == bucket.num_elements


@given(zero_plans())
@settings(deadline=None, max_examples=examples(80))
def test_a_bucket_has_one_rule_and_knows_the_units_that_use_it(plan: Plan) -> None:
    optimizer, zero = plan.mathematics.optimizer, plan.layout.zero
    for stage in range(plan.num_stages):
        part = rank_part(plan, stage)
        specs = {spec.name: spec for spec in held_parameters(plan, part)}
        order = stage_units(part)
        for bucket in plan_buckets(plan, part):
            assert {update_rule_of(optimizer, specs[name]) for name in bucket.names} == {
                bucket.update
            }
            assert bucket.units == tuple(unit for unit in order if unit in bucket.units)
            users = {unit for name in bucket.names for unit in units_using(plan, stage, name)}
            assert set(bucket.units) == users
            assert set(bucket.units) - set(bucket.backward_units) <= {"embedding"}
            small = all(
                specs[name].local_numel(plan.mesh.tp) < zero.keep_whole_below
                for name in bucket.names
            )
            kept = bucket.kind == "partial" or (bucket.kind == "whole" and small)
            assert bucket.sliced == (zero.stage == 3 and not kept)


def units_using(plan: Plan, stage: int, name: str) -> set[str]:
    """Return the units of a stage that use a parameter; a tied embedding is the head as well."""
    if name != "embedding.weight" or not plan.model.tied:
        return {unit_of(name)}
    ends = ("embedding", 0), ("head", plan.num_stages - 1)
    return {unit for unit, end in ends if end == stage}


def test_backward_completes_the_first_bucket_first() -> None:
    plan = plan_of(bucket_bytes=8)
    names = [bucket.names for bucket in buckets_of(plan)]
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
    assert len(buckets_of(plan)) == 1


@pytest.mark.system("S02")
@pytest.mark.parametrize("megabytes", [1, 25, 100])
def test_larger_buckets_are_fewer(megabytes: int) -> None:
    plan = plan_of(
        model=GPT2_SMALL, stages=(tuple(range(12)),), dtype="fp32",
        bucket_bytes=megabytes * 2**20,
    )  # fmt: skip
    buckets = buckets_of(plan)
    whole = [bucket.num_elements * 4 for bucket in buckets if bucket.kind == "whole"]
    block = 7_087_872 * 4
    assert all(size >= megabytes * 2**20 for size in whole[1:-1])
    assert all(size < megabytes * 2**20 + block for size in whole[1:-1])
    assert whole[0] >= min(FIRST_BUCKET_BYTES, megabytes * 2**20)
    assert len(buckets) < len(parameters(GPT2_SMALL))


def test_special_gradients_have_buckets_of_their_own() -> None:
    plan = plan_of(model=QWEN, pp=2, tp=2, sequence_parallel=True)
    kinds = [{b.kind: b.names for b in buckets_of(plan, s)} for s in (0, 1)]
    assert kinds[0]["tied"] == kinds[1]["tied"] == ("embedding.weight",)
    assert "norm.weight" in kinds[1]["partial"]
    assert all("norm" in name for name in kinds[0]["partial"])


def test_what_decays_comes_first_and_keeps_its_order() -> None:
    specs = {spec.name: spec for spec in parameters(GPT2)}
    names = ["norm.bias", "embedding.weight", "norm.weight", "layers.0.mlp.up.weight"]
    matrices, blocks, everything = (
        segment_order(names, specs, Optimizer(decay=decay))
        for decay in ("matrices", "blocks", "all")
    )
    assert matrices == [names[1], names[3], names[0], names[2]]
    assert blocks == [names[3], *names[:3]]
    assert everything == names


def unit_buckets(stage: ZeroStage = 3, **changes: Any) -> list[tuple[str, ...]]:
    """Return the units of each sliced bucket of the first and only stage of a pipeline."""
    plan = zero_plan(stage, dp_shard=2, **changes)
    return [bucket.units for bucket in buckets_of(plan) if bucket.sliced]


def test_at_stage_3_a_bucket_is_a_unit_whatever_its_bytes() -> None:
    units = [("head",), ("layers.3",), ("layers.2",), ("layers.1",), ("layers.0",), ("embedding",)]
    assert unit_buckets(bucket_bytes=8) == unit_buckets(bucket_bytes=2**24) == units
    assert unit_buckets(2) == []


@pytest.mark.system("S24")
def test_blocks_are_gathered_together_by_rule_and_within_a_stage() -> None:
    three = Zero(stage=3, accumulate="slices", unit_blocks=3)
    assert unit_buckets(zero=three) == [
        ("head",),
        ("layers.3",),
        ("layers.0", "layers.1", "layers.2"),
        ("embedding",),
    ]
    plan = zero_plan(3, zero=three, dp_shard=2, pp=2, stages=((0,), (1, 2, 3)))
    assert [[bucket.units for bucket in buckets_of(plan, stage)] for stage in (0, 1)] == [
        [("layers.0",), ("embedding",)],
        [("head",), ("layers.1", "layers.2", "layers.3")],
    ]
    below = zero_plan(2, zero=replace(three, stage=2, bucket_bytes=8), dp_shard=2)
    assert [len(bucket.units) for bucket in buckets_of(below)] == [1] * 6


def test_small_parameters_stay_whole_in_one_bucket() -> None:
    zero = Zero(stage=3, accumulate="slices", keep_whole_below=17)
    buckets = buckets_of(zero_plan(3, zero=zero, dp_shard=2))
    *sliced, small = buckets
    assert all(bucket.sliced for bucket in sliced)
    assert not small.sliced
    assert len(small.names) == 9
    assert all("norm" in name for name in small.names)
    assert small.units == ("layers.0", "layers.1", "layers.2", "layers.3", "head")
    # The threshold is about what a rank holds: half of a matrix at tp = 2.
    names = {
        tp: {
            name
            for bucket in buckets_of(
                zero_plan(3, zero=replace(zero, keep_whole_below=257), dp_shard=2, tp=tp)
            )
            if not bucket.sliced
            for name in bucket.names
        }
        for tp in (1, 2)
    }
    assert names[2] - names[1] == {f"layers.{i}.mlp.{w}.weight" for i in range(4) for w in MLP}


MLP = ("gate", "up", "down")


def test_at_stage_3_norms_of_sequence_parallelism_are_whole_and_tied_ends_are_cut() -> None:
    plan = zero_plan(3, model=QWEN, dp_shard=2, pp=2, tp=2, sequence_parallel=True)
    for stage in (0, 1):
        sliced = {bucket.kind: bucket.sliced for bucket in buckets_of(plan, stage)}
        assert sliced == {"whole": True, "partial": False, "tied": True}
    ends = [
        next(bucket for bucket in buckets_of(plan, stage) if bucket.kind == "tied")
        for stage in (0, 1)
    ]
    assert [end.units for end in ends] == [("embedding",), ("head",)]
    assert [end.backward_units for end in ends] == [(), ("head",)]
    alone = zero_plan(3, model=QWEN, dp_shard=2)
    shared = next(b for b in buckets_of(alone) if "embedding.weight" in b.names)
    assert (shared.kind, shared.units) == ("whole", ("embedding", "head"))
    assert shared.backward_units == ("head",)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_muon_has_the_matrices_of_blocks_in_buckets_of_their_own(stage: ZeroStage) -> None:
    plan = zero_plan(stage, optimizer="muon", dp_shard=2, bucket_bytes=8)
    by_update = {
        update: [name for b in buckets_of(plan) if b.update == update for name in b.names]
        for update in ("muon", "adamw")
    }
    assert sorted(by_update["muon"]) == sorted(
        spec.name for spec in parameters(NANO) if spec.layer is not None and "norm" not in spec.name
    )
    assert {"embedding.weight", "head.weight", "norm.weight"} <= set(by_update["adamw"])
    firsts = [bucket.units[-1] for bucket in buckets_of(plan) if bucket.update == "muon"]
    assert firsts == ["layers.3", "layers.2", "layers.1", "layers.0"]


def test_buckets_smaller_than_any_parameter_hold_a_unit_each() -> None:
    for size in (1, 8):
        plan = zero_plan(1, dp_shard=2, bucket_bytes=size)
        assert [bucket.units for bucket in buckets_of(plan)] == unit_buckets()


def test_layers_that_read_the_same_input_are_a_group() -> None:
    names = fp8_groups(replace(NANO, layers=1))
    parts = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")
    assert names == tuple(f"layers.0.{part}" for part in parts)
    assert fp8_groups(replace(GPT2, layers=1)) == names


def test_all_experts_are_one_and_those_of_every_token_another() -> None:
    assert fp8_group_of("layers.3.mlp.experts.7.up.weight") == "layers.3.mlp.experts.gate_up"
    assert fp8_group_of("layers.3.mlp.shared.down.weight") == "layers.3.mlp.shared.down"
    for model in (MIXTRAL, DEEPSEEK):
        assert any(name.endswith("experts.down") for name in fp8_groups(model))


def test_layers_that_lead_up_from_narrow_vectors_are_groups_of_their_own() -> None:
    latent = LatentAttention(query_rank=24, kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8)
    names = fp8_groups(replace(NANO, layers=1, latent=latent, head_dim=16))
    assert {name.rpartition(".")[2] for name in names} == {
        *("q_up", "kv_up", "o", "gate_up", "down")
    }


@pytest.mark.parametrize(
    "name",
    [
        *("embedding.weight", "head.weight", "layers.0.attention.q.bias"),
        *("layers.0.attention.q_down.weight", "layers.0.mlp.router.weight", "layers.0.mlp_norm"),
    ],
)
def test_what_is_never_in_8_bits_is_in_none(name: str) -> None:
    assert fp8_group_of(name) is None


def test_copies_pieces_and_slices_of_a_mesh() -> None:
    plan = plan_of(dp=2, dp_shard=2, tp=2, zero=Zero(stage=3))
    found = {one.name: one for one in variables_of(plan)}
    weight = found["layers.0.attention.q.weight"]
    assert (weight.copies, weight.pieces, weight.slices) == (2, 2, 2)
    norm = found["layers.0.attention_norm.weight"]
    assert (norm.copies, norm.pieces, norm.slices) == (4, 1, 2)
    assert not any(one.mirrored for one in found.values())


def test_a_tied_embedding_is_mirrored_at_both_ends() -> None:
    found = {one.name: one for one in variables_of(plan_of(model=GPT2, pp=2))}
    assert found["embedding.weight"].mirrored
    assert {name for name, one in found.items() if one.mirrored} == {"embedding.weight"}


def test_experts_are_where_their_ranks_are() -> None:
    found = {one.name: one for one in variables_of(plan_of(model=DEEPSEEK, dp_shard=4, ep=2))}
    routed = [one for name, one in found.items() if ".experts." in name]
    assert routed
    assert {one.copies for one in routed} == {2}
    assert found["embedding.weight"].copies == 4
