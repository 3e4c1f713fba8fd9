# SPDX-License-Identifier: Apache-2.0
"""Constants from runs: of our trainer from whole steps, of a cluster from actions and collectives.

Whole steps (`fit_trainer`): a kernel that runs again and again has its operands in a cache and its
code at hand; in a step it does not, and between kernels there is work of the host. So the bytes
that a block moves, the start of a kernel, and a message between ranks with other work are fitted to
the seconds of whole steps, as `seconds/step.py` predicts them. The constants of kernels and
collectives are where the search begins.

A run of ranks (`fit_run`): actions of a pipeline tell of products, memory and attention,
collectives of links. Each constant has its value so far as its prior, so constants that a run does
not show stay as they were. Predicted seconds are those of `cost/seconds` with all ranks of a node
at work at once, over links that cost nothing where only computing is meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from echelon.core.cluster import TRAINER_CONSTANTS, Cluster, Link, cluster_under_load, joining_tier
from echelon.core.plan import Plan
from echelon.cost.fit.links import seconds_of_collective
from echelon.cost.fit.samples import Collective
from echelon.cost.fit.solver import Array, Constant, ConstantValues, fit, relative_errors
from echelon.cost.inputs.cost_inputs import TrainerConstants
from echelon.cost.inputs.numbers import first_number
from echelon.cost.seconds.from_plan import cost_inputs_from_plan, machine_numbers_from_cluster
from echelon.cost.seconds.step import step_seconds
from echelon.cost.seconds.trainers import our_constants
from echelon.cost.seconds.unit_times import block_kinds, stage_durations, unit_times_by_kind
from echelon.schedule.action import Action, ActionKind

STEP_WEIGHT = 4.0
"""What a step weighs beside a prior: a median of many kernels is known twice as well as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """Give the seconds of a step of a plan; it is `fitted`, or held out."""

    plan: Plan
    seconds: float
    fitted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFit:
    """Hold the cluster with what steps told, and predicted / measured - 1 of every plan."""

    cluster: Cluster
    timed: tuple[TimedStep, ...]
    errors: tuple[float, ...]
    at_bound: tuple[str, ...]


def fit_trainer(
    cluster: Cluster, software: TrainerConstants, timed: Sequence[TimedStep]
) -> TrainerFit:
    """Return `cluster` with the constants of a trainer that the measured steps are nearest to."""

    fitted = [one for one in timed if one.fitted]

    def predict(values: ConstantValues) -> Array:
        return predicted_steps(_with(cluster, values), software, fitted)

    seconds = [one.seconds for one in fitted]
    weights = [STEP_WEIGHT] * len(seconds)
    found = fit(_constants(cluster, software), predict, seconds, weights=weights)
    measured = _with(cluster, found.values)
    predicted = predicted_steps(measured, software, timed)
    return TrainerFit(
        cluster=measured,
        timed=tuple(timed),
        errors=relative_errors(predicted, [one.seconds for one in timed]),
        at_bound=found.at_bound,
    )


def predicted_steps(
    cluster: Cluster, software: TrainerConstants, timed: Sequence[TimedStep]
) -> Array:
    """Return the predicted seconds of steps on the devices of `cluster`."""
    facts = replace(software, **dict(cluster.trainer))

    def seconds(plan: Plan) -> float:
        here = replace(plan, cluster=first_devices(cluster, plan.mesh.world_size))
        return first_number(step_seconds(cost_inputs_from_plan(here, facts)).total)

    return np.asarray([seconds(one.plan) for one in timed])


def first_devices(cluster: Cluster, count: int) -> Cluster:
    """Return the first `count` devices of one node as a cluster of their own."""
    links = tuple(replace(link, degree=count) for link in cluster.links[:1] if count > 1)
    return replace(cluster, devices_per_node=count, nodes=1, links=links)


def plan_label(plan: Plan) -> str:
    """Return a plan in a few words: `dp2xtp2 sp z1 b2`."""
    mesh, layout = plan.mesh, plan.layout
    pipeline, zero = layout.pipeline, layout.zero
    axes = {"pp": mesh.pp, "rep": mesh.dp_replicate, "dp": mesh.dp_shard, "cp": mesh.cp}
    axes["tp"] = mesh.tp
    parts = ["x".join(f"{name}{degree}" for name, degree in axes.items() if degree > 1) or "one"]
    if mesh.pp > 1:
        virtual = len(pipeline.stages) // mesh.pp
        parts.append(pipeline.schedule + (f"/{virtual}" if virtual > 1 else ""))
    if mesh.cp > 1:
        parts.append(layout.context.kind)
    if layout.sequence_parallel:
        parts.append("sp")
    if zero.stage:
        parts.append(f"z{zero.stage}" + ("" if zero.reshard_after_forward else "n"))
    if layout.recompute.policy != "none":
        parts.append(f"re{layout.recompute.every}")
    parts.append(f"b{layout.microbatch_sequences}")
    return " ".join(parts)


_OF_LINK = ("latency_s", "efficiency")


def _constants(cluster: Cluster, software: TrainerConstants) -> tuple[Constant, ...]:
    """Return what is fitted: constants of the trainer, and of the link where there is one."""
    efficiency = cluster.device.efficiency
    start_s = min(max(efficiency.launch_s, 2e-7), 5e-3)
    found = [
        Constant(name="matmul", low=0.02, high=1.0, prior=efficiency.matmul, width=0.1),
        Constant(name="host_s", low=2e-7, high=5e-3, prior=start_s, width=1.0),
        Constant(name="width_bytes", low=4.0, high=1000.0, prior=80.0, width=0.7),
        Constant(name="inner_bytes", low=1.0, high=300.0, prior=20.0, width=0.7),
        Constant(name="logit_bytes", low=2.0, high=500.0, prior=40.0, width=0.7),
        Constant(name="optimizer_bytes", low=8.0, high=1000.0, prior=40.0, width=0.7),
        Constant(name="adding_bytes", low=1.0, high=200.0, prior=8.0, width=0.7),
        Constant(name="step_s", low=1e-5, high=0.5, prior=0.005, width=1.5),
    ]
    if cluster.links:
        link = cluster.links[0]
        low_s, near = link.latency_s, link.efficiency
        found.append(Constant(name="latency_s", low=1e-7, high=5e-2, prior=low_s, width=1.0))
        found.append(Constant(name="own_hops", low=0.02, high=10.0, prior=1.0, width=1.5))
        found.append(Constant(name="pair_hops", low=0.05, high=3.0, prior=0.5, width=1.0))
        found.append(Constant(name="efficiency", low=0.02, high=1.0, prior=near, width=0.5))
    return tuple(found)


def _with(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    device = cluster.device
    efficiency = replace(device.efficiency, matmul=values["matmul"])
    links = cluster.links
    if links:
        of_link = {name: values[name] for name in _OF_LINK}
        links = (replace(links[0], **of_link), *links[1:])
    return replace(
        cluster,
        device=replace(device, efficiency=efficiency),
        links=links,
        trainer=tuple((name, values[name]) for name in TRAINER_CONSTANTS if name in values),
    )


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
        _run_constants(cluster, observed),
        lambda values: predicted_seconds(plan, _with_run_constants(cluster, values), observed),
        [one.seconds for one in observed],
    )
    measured = np.asarray([one.seconds for one in observed])
    before = predicted_seconds(plan, cluster, observed) / measured - 1.0
    return RunFit(
        cluster=_with_run_constants(cluster, found.values),
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


def _run_constants(cluster: Cluster, observed: Sequence[ObservedTime]) -> list[Constant]:
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


def _with_run_constants(cluster: Cluster, values: ConstantValues) -> Cluster:
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
