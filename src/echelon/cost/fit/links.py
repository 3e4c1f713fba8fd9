# SPDX-License-Identifier: Apache-2.0
"""Measured collectives -> latency, bandwidth and half-size message of a tier of links.

Predicted seconds are those of `cost/seconds/collectives.py`, so what is fitted is what a plan
is timed with. Where ranks share cores, the constants are those of ranks that have one each:
collectives of more of them took longer by ranks / cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from echelon.core.cluster import Cluster, Device, Link, cluster_under_load
from echelon.cost.fit.samples import Collective, TimedCollective
from echelon.cost.fit.solver import Array, Constant, ConstantValues, fit, relative_errors
from echelon.cost.inputs.cost_inputs import group_link_numbers
from echelon.cost.inputs.numbers import MachineNumbers
from echelon.cost.seconds.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    point_to_point_seconds,
)
from echelon.cost.seconds.from_plan import machine_numbers_from_cluster

_DEVICE = Device(name="any", memory_bytes=1, memory_bandwidth=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """Hold a link as it was measured, and predicted / measured - 1 of every collective."""

    link: Link
    timed: tuple[TimedCollective, ...]
    errors: tuple[float, ...]
    at_bound: tuple[str, ...]


def bus_bytes(collective: Collective) -> float:
    """Return the bytes that one rank sends in a bandwidth-optimal algorithm."""
    share = (collective.degree - 1) / collective.degree
    if collective.kind == "send":
        return float(collective.num_bytes)
    return (2.0 if collective.kind == "all_reduce" else 1.0) * share * collective.num_bytes


def fit_link(
    link: Link, timed: Sequence[TimedCollective], *, rated: bool = False, cores: float = 0.0
) -> LinkFit:
    """Return `link` with the constants that the times inside of a node are nearest to.

    Its bandwidth is kept where it is `rated`, by a vendor; else it is the best that was measured.
    The ranks of a collective share `cores` (0: each has its own).
    """
    return fit_last_tier(node_of(link, cores), timed, rated=rated)


def fit_last_tier(
    cluster: Cluster, timed: Sequence[TimedCollective], *, rated: bool = False
) -> LinkFit:
    """Return the last link of `cluster` with the constants that the fitted times are nearest to.

    Tiers inside of it stay as they are. An unrated bandwidth is the best that was measured, between
    nodes that of groups with one rank in each, all of which send at once.
    """
    link, fitted = cluster.links[-1], [one for one in timed if one.fitted]
    if not rated:
        node = 1 if cluster.nodes == 1 else cluster.devices_per_node
        best = max(
            bus_bytes(one.collective)
            / one.seconds
            / cluster.device.share(_computing(cluster, one.collective))
            for one in fitted
            if one.collective.stride >= node
        )
        link = replace(link, bandwidth=best)

    def here(values: ConstantValues) -> Cluster:
        return replace(cluster, links=(*cluster.links[:-1], _with(link, values)))

    def predict(values: ConstantValues) -> Array:
        return seconds_on_cluster(here(values), fitted)

    found = fit(_constants(fitted), predict, [one.seconds for one in fitted])
    predicted = seconds_on_cluster(here(found.values), timed)
    return LinkFit(
        link=_with(link, found.values),
        timed=tuple(timed),
        errors=relative_errors(predicted, [one.seconds for one in timed]),
        at_bound=found.at_bound,
    )


def seconds_on_cluster(cluster: Cluster, timed: Sequence[TimedCollective]) -> Array:
    """Return the predicted seconds of collectives of the first ranks of `cluster`."""
    numbers = {
        computing: machine_numbers_from_cluster(cluster_under_load(cluster, computing))
        for computing in {_computing(cluster, one.collective) for one in timed}
    }
    return np.asarray(
        [
            seconds_of_collective(
                numbers[_computing(cluster, one.collective)], one.collective, one.collective.stride
            )
            for one in timed
        ]
    )


def node_of(link: Link, cores: float = 0.0) -> Cluster:
    """One node whose ranks share a link and `cores`."""
    return Cluster(
        name="one",
        device=replace(_DEVICE, cores=cores),
        devices_per_node=link.degree,
        nodes=1,
        links=(link,),
    )


def _computing(cluster: Cluster, one: Collective) -> int:
    """Return how many ranks of a node are at work at once in a collective and those beside it."""
    return min(one.num_ranks, cluster.devices_per_node)


def seconds_of_collective(numbers: MachineNumbers, one: Collective, stride: int = 1) -> float:
    """Return the predicted seconds of one collective of ranks that are `stride` apart."""
    way, size = group_link_numbers(numbers, float(one.degree), float(stride)), float(one.num_bytes)
    if one.kind == "all_reduce":
        return float(all_reduce_seconds(way, size))
    if one.kind == "all_to_all":
        return float(all_to_all_seconds(way, size))
    if one.kind == "send":
        return float(point_to_point_seconds(way, size))
    return float(all_gather_seconds(way, size))


def _constants(timed: Sequence[TimedCollective]) -> tuple[Constant, ...]:
    """Return what is fitted of a link; the quickest collective tells where to begin."""
    quickest = min(one.seconds for one in timed)
    latency = float(np.clip(quickest / 2.0, 2e-7, 1e-2))
    return (
        Constant(name="latency_s", low=1e-7, high=5e-2, prior=latency, width=1.5),
        Constant(name="efficiency", low=0.05, high=1.0, prior=0.8, width=0.4),
        Constant(name="half_bytes", low=1.0, high=2.0**28, prior=2.0**17, width=3.0),
    )


def _with(link: Link, values: Mapping[str, Any]) -> Link:
    return replace(link, **values)
