"""Plans on hosts that are their nodes, and the bytes of a step that must cross from host to host.

A rank sends every other member of a group as much. So of what it sends over an axis, the share that
crosses is that of the members that are on other hosts (`crossing`); which axes lie inside of a host
and which are between hosts alone, their names say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from bench.harness.host_ranks import ADDRESS, RANK
from echelon.config.load import load_job
from echelon.core.axis import Axis
from echelon.core.plan import Plan, Zero
from echelon.cost.bytes.data import SHARD_ACROSS_AXIS, SHARD_WITHIN_AXIS
from echelon.cost.bytes.local_sgd import outer_bytes
from echelon.cost.bytes.sent import bytes_sent_by_axis
from echelon.cost.bytes.servers import SERVERS_AXIS
from echelon.layout.islands import plan_and_rank

HOSTS = 2
TIMEOUT_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedPlan:
    """Name a plan on `HOSTS` hosts of `each` ranks; `steps` are taken before they are counted."""

    name: str
    plan: Plan
    each: int
    warmup: int = 2
    steps: int = 4


def zero_plans(each: int, settings: Sequence[str] = ()) -> dict[str, Plan]:
    """Return ZeRO 3 over two nodes of so many ranks: plain, with each part of ZeRO++, and all."""
    shards = HOSTS * each
    base = load_job(
        "nano",
        (
            *(f"mesh.dp_shard={shards}", "zero.stage=3"),
            *(f"batch.global_sequences={2 * shards}", "batch.microbatch_sequences=1"),
            *settings,
        ),
    ).plan
    base = on_hosts(base, each)
    zero = base.layout.zero
    return {
        "ZeRO 3": base,
        "secondary slices (hpZ)": with_zero(base, replace(zero, secondary=True)),
        "gathers in int8 (qwZ)": with_zero(base, replace(zero, gather="int8"), int8_block=64),
        "sums in int8 (qgZ)": with_zero(base, replace(zero, reduce="int8")),
        "sums in int4 (qgZ)": with_zero(base, replace(zero, reduce="int4")),
        "hpZ, qwZ and qgZ": with_zero(
            base, replace(zero, secondary=True, gather="int8", reduce="int8"), int8_block=64
        ),
    }


def on_hosts(plan: Plan, each: int) -> Plan:
    """Return a plan whose nodes are hosts of so many ranks."""
    return replace(plan, cluster=replace(plan.cluster, devices_per_node=each, nodes=HOSTS))


def with_zero(plan: Plan, zero: Zero, *, int8_block: int = 0) -> Plan:
    """Return a plan with other settings of ZeRO."""
    precision = replace(plan.mathematics.precision, int8_block=int8_block)
    numbers = replace(plan.mathematics, precision=precision)
    return replace(plan, mathematics=numbers, layout=replace(plan.layout, zero=zero))


def crossing(plan: Plan, axis: str) -> float:
    """Return the share of what a rank sends over an axis that leaves its host."""
    each, world = plan.cluster.devices_per_node, plan.mesh.world_size
    if axis in (SHARD_ACROSS_AXIS, SERVERS_AXIS):
        return 1.0
    if axis == SHARD_WITHIN_AXIS:
        return 0.0
    if plan.mesh.servers:
        # All workers are on one host, all servers on the other.
        return 0.0
    return (world - each) / (world - 1)


def planned_by_axis(plan: Plan, rank: int, step: int) -> Mapping[str, int]:
    """Return what a rank sends in a step by the formulas, by axis."""
    if not plan.mathematics.local_sgd.active:
        return bytes_sent_by_axis(plan, rank)
    found = bytes_sent_by_axis(*plan_and_rank(plan, rank))
    for term in outer_bytes(plan, rank, step):
        found[term.axis] = found.get(term.axis, 0) + term.bytes
    return found


def planned_far(plan: Plan, steps: range) -> int:
    """Return what all ranks send to other hosts in some steps, by the formulas."""
    far = 0.0
    for rank in range(plan.mesh.world_size):
        for step in steps:
            by_axis = planned_by_axis(plan, rank, step)
            far += sum(crossing(plan, axis) * count for axis, count in by_axis.items())
    return round(far)


def join_hosts(world_size: int) -> int:
    """Meet the other ranks over Gloo, as a process with one thread; return the own rank."""
    rank, address = int(os.environ[RANK]), os.environ[ADDRESS]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:29500",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    torch.set_num_threads(1)
    return rank


def served_plan(*settings: str) -> Plan:
    """Return two workers, on one host, and two servers, on the other."""
    workers = f"mesh.{Axis.DP_REPLICATE.value}={HOSTS}"
    sets = (workers, "servers.count=2", "optimizer.warmup_steps=0", *settings)
    return on_hosts(load_job("nano", sets).plan, 2)


def islands(*settings: str) -> Plan:
    """Return two islands of one rank, each on a host of its own, that meet every two steps."""
    sets = (
        *(f"mesh.{Axis.DP_REPLICATE.value}={HOSTS}", "local_sgd.every=2", "train.steps=64"),
        *("optimizer.warmup_steps=0", *settings),
    )
    return on_hosts(load_job("nano", sets).plan, 1)
