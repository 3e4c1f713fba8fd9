"""The walk of a place: shared by those that are alike, and the same as one of its own."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.activations.numbers import activation_numbers_from_plan
from echelon.cost.activations.timeline import RankActivations
from echelon.cost.peak.place_walk import (
    END,
    HighestMoment,
    PlaceWalk,
    WeightOrder,
    operator_of,
    writes_at_end,
)
from echelon.cost.peak.rank_peak import TERMS, PeakWalk, message_counts
from echelon.layout.stage import held_experts, part_of, stage_parameters
from echelon.schedule.from_plan import schedule_from_plan

PIPELINE = ("mesh.pp=4", "model.layers=8", "batch.global_sequences=32")
ZERO = ("mesh.dp_shard=2", "zero.stage=3")


def plan_of(*flags: str) -> Plan:
    return load_job("nano", flags).plan


def walk_of(plan: Plan, rank: int) -> PlaceWalk:
    return PlaceWalk(plan, rank, activation_numbers_from_plan(plan), dict.fromkeys(TERMS, 0.0))


def highest(plan: Plan, walk: PlaceWalk, rank: int) -> HighestMoment:
    pp = plan.mesh.coordinates(rank)[Axis.PP]
    row = schedule_from_plan(plan).actions[pp]
    return walk.highest(row, message_counts(plan)[pp], part_of(plan, rank))


@pytest.mark.parametrize("flags", [(), ZERO, ("mesh.dp_shard=2", "zero.stage=2")])
def test_a_place_that_is_alike_takes_the_walk_of_another(flags: tuple[str, ...]) -> None:
    plan = plan_of(*PIPELINE, *flags)
    second, third = (stage * plan.mesh.world_size // 4 for stage in (1, 2))
    shared = walk_of(plan, second)
    own = highest(plan, shared, second)
    other = highest(plan, shared, third)
    assert other == highest(plan, walk_of(plan, third), third)
    # The third place has fewer microbatches in flight than the second, and blocks of its own.
    assert own.terms["activations"] > other.terms["activations"]
    assert own.where != other.where
    assert highest(plan, shared, second) == own


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ZERO,
        ("pipeline.schedule=interleaved-1f1b", "pipeline.virtual_stages=2", *ZERO),
        ("recompute.policy=full", "recompute.every=2"),
        ("optimizer.kind=muon", "mesh.dp_shard=2", "zero.stage=1"),
    ],
)
def test_peaks_found_together_are_those_of_each_rank_alone(flags: tuple[str, ...]) -> None:
    plan = plan_of(*PIPELINE, *flags)
    together = PeakWalk(plan).by_place()
    assert together == [PeakWalk(plan).peak(one.rank) for one in together]


def test_units_are_called_by_the_blocks_of_the_rank_that_asks() -> None:
    plan = plan_of(*PIPELINE)
    for stage, one in enumerate(PeakWalk(plan).by_place()):
        blocks = {f"layers.{block}" for block in plan.layout.pipeline.stages[stage]}
        assert one.where.split(", ")[1] in {*blocks, "head"}


LATENT = (
    "model.latent.query_rank=24",
    "model.latent.kv_rank=16",
    "model.latent.nope_dim=16",
    "model.latent.rope_dim=8",
    "model.latent.value_dim=16",
    "model.kv_heads=4",
)
MIXED = (
    "model.experts.num_experts=4",
    "model.experts.top_k=2",
    "model.experts.ffn=96",
    "model.experts.shared_experts=1",
)


def order_of(plan: Plan) -> WeightOrder:
    part = part_of(plan, 0)
    specs = stage_parameters(plan, part.stages[0], held_experts(plan, part))
    return WeightOrder(plan, RankActivations(plan, 0).units(0, 0), specs)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("model.tied=true",),
        ("model.qk_norm=true", "model.qkv_bias=true", "model.norm=layernorm"),
        ("model.positions=learned", "model.gated=false", "model.activation=gelu"),
        ("mesh.tp=2", "mesh.sequence_parallel=true"),
        ("mesh.cp=2",),
        LATENT,
        (*LATENT, "mesh.tp=2"),
        MIXED,
        (*MIXED, "mesh.tp=2"),
    ],
)
def test_each_gradient_is_written_once_in_either_pass(flags: tuple[str, ...]) -> None:
    plan = plan_of(*flags)
    part = part_of(plan, 0)
    specs = stage_parameters(plan, part.stages[0], held_experts(plan, part))
    names = sorted([spec.name for spec in specs] + ["embedding.weight"] * plan.model.tied)
    order = order_of(plan)
    for found in (order.whole, order.by_operator):
        assert sorted(name for listed in found.values() for name in listed) == names
    operators = {
        one.name for unit in RankActivations(plan, 0).units(0, 0) for one in unit.operators
    }
    assert {operator_of(plan, spec) for spec in specs} <= operators
    assert END not in order.by_operator


def test_products_wait_for_a_collective() -> None:
    down, up = "layers.1.mlp.down.weight", "layers.1.mlp.up.weight"
    query = "layers.1.attention.q.weight"
    alone = order_of(plan_of()).whole
    assert down in alone["layers.1", "down"]
    whole = order_of(plan_of("mesh.tp=2", "mesh.sequence_parallel=false")).whole
    assert down in whole["layers.1", "gate, up"]
    assert up in whole["layers.1", "gate, up"]
    split = order_of(plan_of("mesh.tp=2", "mesh.sequence_parallel=true")).whole
    assert down in split["layers.1", "gate, up"]
    assert up in split["layers.1", "o"]
    assert query in split["layers.0", "down"]


def test_chunks_of_experts_write_as_often() -> None:
    plan = plan_of(*MIXED, "mesh.dp_shard=2", "mesh.ep=2", "experts.chunks=2")
    found = order_of(plan).whole["layers.0", "shared experts"]
    assert found.count("layers.0.mlp.experts.0.down.weight") == 2


def test_norms_write_when_their_work_is_done() -> None:
    assert writes_at_end("mlp norm", fused_norm=False)
    assert not writes_at_end("mlp norm", fused_norm=True)
    assert not writes_at_end("down", fused_norm=False)
