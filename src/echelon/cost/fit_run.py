"""What ranks of a run did -> the constants of their cluster, moved as far as the run says so.

Actions of a pipeline tell of products, memory and attention, collectives of links. Each constant
has its value so far as its prior, so what a run does not show stays as it was. Predicted seconds
are those of the lattice with all ranks of a node at work at once, over links that cost nothing
where only computing is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from echelon.core.cluster import Cluster, Link
from echelon.core.plan import Plan
from echelon.core.topology import crossed_tier, crowded
from echelon.cost.fit import Array, Constant, Values, fit
from echelon.cost.fit_links import seconds_of_collective
from echelon.cost.fit_samples import Collective
from echelon.cost.lattice.frameworks import FRAMEWORKS
from echelon.cost.lattice.numbers import Num
from echelon.cost.lattice.of_cluster import machine_numbers
from echelon.cost.lattice.of_plan import work_of
from echelon.cost.lattice.step import Blocks, blocks_of

FREE = 1e18
"""Bytes per second of a link that costs nothing."""
WIDTH = 0.7
"""How far from its prior a constant may be: a factor of two is one standard deviation."""
COMPUTED = ("matmul", "memory", "attention", "attention_backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Give the seconds that an action of a stage computes: F, B, W or BW, without its messages."""

    kind: str
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Travel:
    """Give a collective over a group of ranks that are `stride` apart."""

    collective: Collective
    stride: int
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Hold what was seen `count` times in a run, and the seconds that it usually took."""

    what: Action | Travel
    seconds: float
    count: int

    @property
    def name(self) -> str:
        """Return what to call it in a table."""
        if isinstance(self.what, Action):
            return f"{self.what.kind} of stage {self.what.stage}"
        return f"{self.what.axis} {self.what.collective}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFit:
    """Hold the cluster after a run, and predicted / measured - 1 before and after."""

    cluster: Cluster
    before: tuple[float, ...]
    after: tuple[float, ...]
    at_bound: tuple[str, ...]


def fit_run(plan: Plan, observed: Sequence[Observed]) -> RunFit:
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
        before=tuple(float(error) for error in before),
        after=tuple(float(error) for error in found.errors),
        at_bound=found.at_bound,
    )


def predicted_seconds(plan: Plan, cluster: Cluster, observed: Sequence[Observed]) -> Array:
    """Return the seconds of what was observed, on `cluster`."""
    actions = {one.what for one in observed if isinstance(one.what, Action)}
    computed = _computed(plan, cluster, actions) if actions else {}
    numbers = machine_numbers(_busy(plan, cluster))
    return np.asarray(
        [
            computed[one.what]
            if isinstance(one.what, Action)
            else seconds_of_collective(numbers, one.what.collective, one.what.stride)
            for one in observed
        ]
    )


def _computed(plan: Plan, cluster: Cluster, actions: set[Action]) -> dict[Action, float]:
    busy = _busy(plan, cluster)
    free = replace(busy, links=tuple(_free(link) for link in cluster.links))
    # What the cluster says of a kernel's start is what our trainer's host takes for it.
    software = replace(FRAMEWORKS["echelon"], host_s=busy.device.efficiency.launch_s)
    blocks = blocks_of(work_of(replace(plan, cluster=free), software))
    return {action: _action_seconds(plan, blocks, action) for action in actions}


def _busy(plan: Plan, cluster: Cluster) -> Cluster:
    return crowded(cluster, min(plan.mesh.world_size, cluster.devices_per_node))


def _action_seconds(plan: Plan, blocks: Blocks, action: Action) -> float:
    stages = plan.layout.pipeline.stages
    seconds: Num = 0.0
    for layer in stages[action.stage]:
        block = blocks.mixture if plan.model.layer_has_experts(layer) else blocks.dense
        again = plan.layout.recompute.recomputes(layer)
        if action.kind == "F":
            seconds = seconds + block.forward.compute
        if "B" in action.kind:
            seconds = seconds + block.inputs.compute + again * block.forward.compute
        if "W" in action.kind:
            seconds = seconds + block.weights
    if action.stage == 0 and action.kind in ("F", "BW", "W"):
        seconds = seconds + blocks.ends.embedding / 2.0
    if action.stage == len(stages) - 1:
        back = {"F": 0.0, "B": 0.5, "W": 0.5, "BW": 1.0}[action.kind]
        head = blocks.ends.head_forward if action.kind == "F" else 0.0
        seconds = seconds + head + back * blocks.ends.head_backward
    return float(seconds)


def _free(link: Link) -> Link:
    return replace(link, bandwidth=FREE, latency_s=0.0, efficiency=1.0, half_bytes=0.0)


def _constants(cluster: Cluster, observed: Sequence[Observed]) -> list[Constant]:
    """Return the constants of the device, and of each tier of links that was used."""
    efficiency = cluster.device.efficiency
    found = [_around(name, getattr(efficiency, name), 0.005, 1.0) for name in COMPUTED]
    found.append(_around("launch_s", efficiency.launch_s, 1e-7, 1e-2))
    used = {_tier(cluster, one.what) for one in observed if isinstance(one.what, Travel)}
    for index in sorted(used):
        link = cluster.links[index]
        found.append(_around(f"links.{index}.latency_s", link.latency_s, 1e-8, 0.1))
        found.append(_around(f"links.{index}.efficiency", link.efficiency, 0.005, 1.0))
        found.append(_around(f"links.{index}.half_bytes", link.half_bytes, 1.0, 2.0**30))
    return found


def _around(name: str, value: float, low: float, high: float) -> Constant:
    return Constant(name=name, low=low, high=high, prior=min(max(value, low), high), width=WIDTH)


def _tier(cluster: Cluster, travel: Travel) -> int:
    degree, stride = travel.collective.degree, travel.stride
    link = crossed_tier(cluster, degree, stride)
    assert link is not None, "a collective has several ranks"
    return cluster.links.index(link)


def _with(cluster: Cluster, values: Values) -> Cluster:
    own = {name: value for name, value in values.items() if "." not in name}
    links = list(cluster.links)
    for name, value in values.items():
        if name.startswith("links."):
            _, index, field = name.split(".")
            links[int(index)] = _set(links[int(index)], field, value)
    efficiency = replace(cluster.device.efficiency, **own)
    device = replace(cluster.device, efficiency=efficiency)
    return replace(cluster, device=device, links=tuple(links))


def _set(link: Link, field: str, value: float) -> Link:
    changed: dict[str, Any] = {field: value}
    return replace(link, **changed)
