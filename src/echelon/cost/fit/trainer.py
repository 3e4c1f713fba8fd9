# SPDX-License-Identifier: Apache-2.0
"""Measured steps of our trainer -> the constants that only a step tells, and what its links reach.

A kernel that runs again and again has its operands in a cache and its code at hand; in a step it
does not, and between kernels there is work of the host. So how many bytes a block moves, what the
start of a kernel takes, and what a message takes that ranks with other work send one another is
fitted to the seconds of whole steps, as `seconds/step.py` predicts them. What kernels and
collectives told before is where the search begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from echelon.core.cluster import TRAINER_CONSTANTS, Cluster
from echelon.core.plan import Plan
from echelon.cost.fit.solver import Array, Constant, ConstantValues, fit, relative_errors
from echelon.cost.inputs.cost_inputs import TrainerConstants
from echelon.cost.inputs.numbers import first_number
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.cost.seconds.step import step_seconds

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
