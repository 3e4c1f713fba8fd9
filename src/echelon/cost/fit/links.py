"""Measured collectives -> latency, bandwidth and half-size message of the link of a node.

Predicted seconds are those of `cost/seconds/collectives.py`, so what is fitted is what a plan is
timed with. Where ranks share cores, the constants are those of ranks that have one each:
collectives of more of them took longer by ranks / cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from echelon.core.cluster import Cluster, Device, Link, cluster_under_load
from echelon.cost.fit.samples import Collective, TimedCollective
from echelon.cost.fit.solver import Array, Constant, ConstantValues, fit
from echelon.cost.seconds.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    group_link_numbers,
    point_to_point_seconds,
)
from echelon.cost.seconds.from_plan import machine_numbers_from_cluster
from echelon.cost.seconds.numbers import MachineNumbers

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
    """Return `link` with the constants that the times are nearest to.

    Its bandwidth is kept where it is `rated`, by a vendor; else it is the best that was measured.
    The ranks of a collective share `cores` (0: each has its own).
    """
    if not rated:
        device = replace(_DEVICE, cores=cores)
        best = max(
            bus_bytes(one.collective) / one.seconds / device.share(one.collective.degree)
            for one in timed
        )
        link = replace(link, bandwidth=best)

    def predict(values: ConstantValues) -> Array:
        return collective_seconds(_with(link, values), timed, cores=cores)

    found = fit(_constants(timed), predict, [one.seconds for one in timed])
    return LinkFit(
        link=_with(link, found.values),
        timed=tuple(timed),
        errors=found.errors,
        at_bound=found.at_bound,
    )


def collective_seconds(
    link: Link, timed: Sequence[TimedCollective], *, cores: float = 0.0
) -> Array:
    """Return the predicted seconds of collectives over one link, whose ranks share `cores`."""
    alone = Cluster(
        name="one",
        device=replace(_DEVICE, cores=cores),
        devices_per_node=link.degree,
        nodes=1,
        links=(link,),
    )
    degrees = {one.collective.degree for one in timed}
    numbers = {
        degree: machine_numbers_from_cluster(cluster_under_load(alone, degree))
        for degree in degrees
    }
    return np.asarray(
        [seconds_of_collective(numbers[one.collective.degree], one.collective) for one in timed]
    )


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
