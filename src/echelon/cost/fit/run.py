# SPDX-License-Identifier: Apache-2.0
"""What ranks of a run did -> the constants of their cluster, moved as far as the run says so.

Actions of a pipeline tell of products, memory and attention, collectives of links. Each constant
has its value so far as its prior, so what a run does not show stays as it was. Predicted seconds
are those of `cost/seconds` with all ranks of a node at work at once, over links that cost nothing
where only computing is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from echelon.core.cluster import Cluster, Link, cluster_under_load, joining_tier
from echelon.core.plan import Plan
from echelon.cost.fit.links import seconds_of_collective
from echelon.cost.fit.samples import Collective
from echelon.cost.fit.solver import Array, Constant, ConstantValues, fit
from echelon.cost.seconds.from_plan import cost_inputs_from_plan, machine_numbers_from_cluster
from echelon.cost.seconds.trainers import our_constants
from echelon.cost.seconds.unit_times import block_kinds, stage_durations, unit_times_by_kind
from echelon.schedule.action import Action, ActionKind

FREE = 1e18
"""Bytes per second of a link that costs nothing."""
WIDTH = 0.7
"""How far from its prior a constant may be: a factor of two is one standard deviation."""
COMPUTED = ("matmul", "memory", "attention", "attention_backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAction:
    """Give the seconds that an action of a stage computes: F, B, W or BW, without its messages."""

    kind: str
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCollective:
    """Give a collective over a group of ranks that are `stride` apart."""

    collective: Collective
    stride: int
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedTime:
    """Hold what was seen `count` times in a run, and the seconds that it usually took."""

    operation: StageAction | GroupCollective
    seconds: float
    count: int

    @property
    def name(self) -> str:
        """Return what to call it in a table."""
        if isinstance(self.operation, StageAction):
            return f"{self.operation.kind} of stage {self.operation.stage}"
        return f"{self.operation.axis} {self.operation.collective}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFit:
    """Hold the cluster after a run, and predicted / measured - 1 before and after."""

    cluster: Cluster
    before: tuple[float, ...]
    after: tuple[float, ...]
    at_bound: tuple[str, ...]


def fit_run(plan: Plan, observed: Sequence[ObservedTime]) -> RunFit:
    """Return the cluster of `plan` with the constants that are nearest to what was observed."""
    cluster = plan.cluster
    found = fit(
        _constants(cluster, observed),
        lambda values: predicted_seconds(plan, _with(cluster, values), observed),
        [one.seconds for one in observed],
    )
    measured = np.asarray([one.seconds for one in observed])
    before = predicted_seconds(plan, cluster, observed) / measured - 1.0
    return RunFit(
        cluster=_with(cluster, found.values),
        before=tuple(map(float, before)),
        after=found.errors,
        at_bound=found.at_bound,
    )


def predicted_seconds(plan: Plan, cluster: Cluster, observed: Sequence[ObservedTime]) -> Array:
    """Return the seconds of what was observed, on `cluster`."""
    actions = {one.operation for one in observed if isinstance(one.operation, StageAction)}
    computed = _computed(plan, cluster, actions) if actions else {}
    numbers = machine_numbers_from_cluster(_busy(plan, cluster))
    return np.asarray(
        [
            computed[one.operation]
            if isinstance(one.operation, StageAction)
            else seconds_of_collective(numbers, one.operation.collective, one.operation.stride)
            for one in observed
        ]
    )


def _computed(plan: Plan, cluster: Cluster, actions: set[StageAction]) -> dict[StageAction, float]:
    busy = _busy(plan, cluster)
    free = replace(busy, links=tuple(_free(link) for link in cluster.links))
    # What the cluster says of a kernel's start is what our trainer's host takes for it.
    software = replace(our_constants(cluster), host_s=busy.device.efficiency.launch_s)
    work = cost_inputs_from_plan(replace(plan, cluster=free), software)
    durations = stage_durations(plan, unit_times_by_kind(plan.model, block_kinds(plan), work))
    return {
        one: durations.seconds_of(Action(ActionKind(one.kind), one.stage, 0)) for one in actions
    }


def _busy(plan: Plan, cluster: Cluster) -> Cluster:
    return cluster_under_load(cluster, min(plan.mesh.world_size, cluster.devices_per_node))


def _free(link: Link) -> Link:
    return replace(link, bandwidth=FREE, latency_s=0.0, efficiency=1.0, half_bytes=0.0)


def _constants(cluster: Cluster, observed: Sequence[ObservedTime]) -> list[Constant]:
    """Return the constants of the device, and of each tier of links that was used."""
    efficiency = cluster.device.efficiency
    found = [_around(name, getattr(efficiency, name), 0.005, 1.0) for name in COMPUTED]
    found.append(_around("launch_s", efficiency.launch_s, 1e-7, 1e-2))
    used = {
        _tier(cluster, one.operation)
        for one in observed
        if isinstance(one.operation, GroupCollective)
    }
    for index in sorted(used):
        link = cluster.links[index]
        found.append(_around(f"links.{index}.latency_s", link.latency_s, 1e-8, 0.1))
        found.append(_around(f"links.{index}.efficiency", link.efficiency, 0.005, 1.0))
        found.append(_around(f"links.{index}.half_bytes", link.half_bytes, 1.0, 2.0**30))
    return found


def _around(name: str, value: float, low: float, high: float) -> Constant:
    return Constant(name=name, low=low, high=high, prior=min(max(value, low), high), width=WIDTH)


def _tier(cluster: Cluster, collective: GroupCollective) -> int:
    degree, stride = collective.collective.degree, collective.stride
    link = joining_tier(cluster, degree, stride)
    assert link is not None, "a collective has several ranks"
    return cluster.links.index(link)


def _with(cluster: Cluster, values: ConstantValues) -> Cluster:
    own = {name: value for name, value in values.items() if "." not in name}
    links = list(cluster.links)
    for name, value in values.items():
        if name.startswith("links."):
            _, index, field = name.split(".")
            changed: dict[str, Any] = {field: value}
            links[int(index)] = replace(links[int(index)], **changed)
    efficiency = replace(cluster.device.efficiency, **own)
    device = replace(cluster.device, efficiency=efficiency)
    return replace(cluster, device=device, links=tuple(links))
