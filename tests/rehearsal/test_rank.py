"""One rank, rehearsed: it holds what the formulas say, and calls what the engine calls on Gloo."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from echelon.config.load import load_job
from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.bytes.sent import bytes_sent_by_axis
from echelon.launch.local.supervisor import RankPool
from echelon.planner.predict.estimate import peak_bytes_by_place
from echelon.rehearsal.memory import GATHERED, GRADIENTS, OPTIMIZER, PARAMETERS
from echelon.rehearsal.order import Issue
from echelon.rehearsal.rank import RankRehearsal, rehearse_rank
from echelon.rehearsal.run import on_nccl
from tests.rehearsal.engine_targets import (
    call_of,
    issued_in_rehearsal,
    issued_on_gloo,
    recorded_calls,
)

BF16 = ("precision.parameters=bf16", "precision.master=fp32")

FP8 = ("precision.matmul=fp8", "precision.fp8_block=16", "precision.fp8_scales=tensor")

DENSE = {
    "scales of tensors": ("mesh.tp=2", "mesh.sequence_parallel=true", *BF16, *FP8),
    "scales of tensors, zero bubble": (
        *("mesh.pp=2", "pipeline.schedule=zb-h1", "model.layers=4", *BF16),
        *FP8,
    ),
    "tp with sequences": ("mesh.tp=2", "mesh.sequence_parallel=true"),
    "tp in chunks": ("mesh.tp=2", "mesh.sequence_parallel=true", "mesh.tp_overlap=ring", *BF16),
    "tp, fused": (
        "cluster.preset=2xh100",
        "mesh.tp=2",
        "mesh.sequence_parallel=true",
        "mesh.tp_overlap=symmetric-memory",
        *BF16,
    ),
    "pp, tied": ("mesh.pp=2", "mesh.dp_replicate=2", "model.layers=4"),
    "zero 1": ("mesh.dp_shard=2", "zero.stage=1", *BF16),
    "zero 2": ("mesh.dp_shard=2", "zero.stage=2", *BF16),
    "zero 3": ("mesh.dp_shard=2", "mesh.dp_replicate=2", "zero.stage=3", *BF16),
    "ring": ("mesh.cp=2", "context.kind=ring"),
    "ulysses": ("mesh.cp=2", "context.kind=ulysses"),
    "zero bubble": ("mesh.pp=2", "pipeline.schedule=zb-h1", "model.layers=4"),
    "offload": ("mesh.dp_shard=2", "zero.stage=1", "zero.optimizer_offload=host", *BF16),
}


TIED = {
    "interleaved": ("mesh.pp=2", "pipeline.schedule=interleaved-1f1b", "pipeline.virtual_stages=2"),
    "three ranks": ("mesh.pp=3", "mesh.dp_replicate=2", "batch.global_sequences=24"),
    "zero 1": ("mesh.pp=2", "mesh.dp_shard=2", "zero.stage=1", "zero.bucket_bytes=40000"),
}
"""Pipelines whose ends share an embedding, and whose ranks have several buckets."""


@pytest.mark.quick("interleaved")
@pytest.mark.parametrize("name", TIED)
def test_members_of_a_group_call_an_operation_by_one_name(name: str) -> None:
    """Ranks that wait long are compared by these names: others would be a false alarm."""
    plan = on_nccl(plan_of(*TIED[name], "model.layers=8", "model.tied=true"))
    calls: dict[tuple[object, ...], list[list[str]]] = {}
    for rank in range(plan.mesh.world_size):
        own: dict[tuple[object, ...], list[str]] = {}
        for entry in rehearse_rank(plan, rank).entries:
            if isinstance(entry, Issue) and entry.kind not in ("send", "receive"):
                own.setdefault((entry.communicator, entry.members), []).append(entry.name)
        for group, names in own.items():
            calls.setdefault(group, []).append(names)
    assert any(len(names) > 1 for names in calls.values())
    assert all(names == first for first, *others in calls.values() for names in others)
    assert "gradients.tied" in {name for (first, *_) in calls.values() for name in first}


def plan_of(*flags: str) -> Plan:
    return load_job("nano", flags).plan


def rehearsed(plan: Plan, rank: int = 0) -> RankRehearsal:
    return rehearse_rank(on_nccl(plan), rank)


@pytest.mark.quick("tp, fused", "offload")
@pytest.mark.parametrize("name", DENSE)
def test_a_rank_holds_and_sends_what_the_formulas_say(name: str) -> None:
    plan = on_nccl(plan_of(*DENSE[name]))
    for rank in (0, plan.mesh.world_size - 1):
        found = rehearse_rank(plan, rank)
        planned = peak_bytes_by_place(plan)[plan.mesh.coordinates(rank)[Axis.PP]]
        for term in (PARAMETERS, GRADIENTS, OPTIMIZER):
            assert found.held.get(term, 0) == planned[term], term
        # At its peak a rank may have fewer units than at another time.
        assert found.at_peak.get(GATHERED, 0) == planned["gathered"] <= found.most.get(GATHERED, 0)
        assert dict(found.sent) == bytes_sent_by_axis(plan, rank)
        assert not found.misuses


@pytest.mark.quick("flags3")
@pytest.mark.parametrize(
    "flags",
    [
        ("mesh.pp=2", "mesh.dp_shard=2", "zero.stage=1", "model.layers=4"),
        ("mesh.tp=2", "mesh.cp=2", "mesh.sequence_parallel=true"),
        ("mesh.tp=4", "model.kv_heads=4", "mesh.sequence_parallel=true", "mesh.tp_overlap=ring"),
        ("mesh.dp_shard=4", "zero.stage=3"),
    ],
)
def test_a_rank_calls_what_the_engine_calls(flags: tuple[str, ...], rank_pool: RankPool) -> None:
    plan = plan_of(*flags)
    argument = {"plan": plan.to_json()}
    on_gloo = rank_pool.run(recorded_calls, argument, plan.mesh.world_size)
    for rank, calls in enumerate(on_gloo):
        ours = [call_of(event) for event in rehearsed(plan, rank).events]
        assert Counter(ours) == Counter(tuple(one) for one in calls), rank


EXECUTED = {
    "zero 3": ("mesh.dp_shard=2", "mesh.tp=2", "zero.stage=3"),
    "zero bubble, tied": (
        "mesh.pp=2",
        "mesh.dp_replicate=2",
        "model.layers=4",
        "pipeline.schedule=zb-v",
        "zero.bucket_bytes=65536",
    ),
    "ring": ("mesh.cp=4", "context.kind=ring"),
    "experts": ("mesh.dp_shard=2", "mesh.ep=2", "mesh.pp=2"),
    "eight ranks": ("mesh.pp=2", "mesh.dp_shard=2", "mesh.tp=2", "zero.stage=2", "model.layers=4"),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", EXECUTED)
def test_communicators_are_given_what_they_are_given_on_gloo(
    name: str, rank_pool: RankPool
) -> None:
    """The same operations in the same order, from the start of the run to the end of two steps."""
    plan = load_job("toy-experts" if name == "experts" else "nano", EXECUTED[name]).plan
    argument = {"plan": plan.to_json()}
    on_gloo = rank_pool.run(issued_on_gloo, argument, plan.mesh.world_size)
    for rank, issued in enumerate(on_gloo):
        ours = issued_in_rehearsal(rehearsed(plan, rank))
        assert ours == [tuple(one) for one in issued], rank


def test_a_step_in_bf16_peaks_where_its_plan_says() -> None:
    plan = on_nccl(plan_of("mesh.tp=2", *BF16))
    found = rehearse_rank(plan, 0)
    planned = sum(peak_bytes_by_place(plan)[0].values())
    assert planned == pytest.approx(found.peak_bytes, rel=0.02)
    assert sum(found.at_peak.values()) == found.peak_bytes
    assert max(one.peak_bytes for one in found.points) <= found.peak_bytes


def test_each_action_leaves_a_point() -> None:
    plan = plan_of("mesh.pp=2", "model.layers=4")
    found = rehearsed(plan)
    assert len(found.points) == 2 * plan.num_microbatches
    assert [one.action for one in found.points[:2]] == ["F0.0", "F0.1"]
    assert found.points[-1].kept.keys() >= {PARAMETERS, GRADIENTS, OPTIMIZER}


def test_more_rows_are_more_bytes_and_no_more_kernels() -> None:
    plan = plan_of("mesh.tp=2")
    longer = replace(
        plan,
        mathematics=replace(
            plan.mathematics, sequence_length=plan.mathematics.sequence_length // 2
        ),
    )
    (few, many) = (rehearsed(one).work["F"] for one in (longer, plan))
    assert few.kernels == many.kernels
    assert few.bytes < many.bytes
    assert few.flops < many.flops
