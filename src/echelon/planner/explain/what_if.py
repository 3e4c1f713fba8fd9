# SPDX-License-Identifier: Apache-2.0
"""Other clusters and batches that are asked about: each a request, and the plan of now on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from echelon.config.cluster.settings import named_cluster, smallest_cluster
from echelon.config.entries import Entry
from echelon.core.cluster import Cluster, Device, Link
from echelon.planner.explain.plan_changes import with_recounted_microbatches
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.search.other_requests import request_on_cluster
from echelon.planner.search.request import SearchRequest

MEMORY = (0.5, 0.9, 1.25)  # times that of a device
_BANDWIDTH = (0.5, 1.25, 2.0)  # times that of a link
WITHIN = (0.5, 2.0)  # times that inside a node
_PEAK = (0.8, 1.25)  # times that of a device
_LATENCY = (2.0,)  # times that of a link


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Name something that is otherwise, with the request for it and the plan of now under it."""

    name: str
    request: SearchRequest
    current_plan: CandidatePlan


def what_if_requests(request: SearchRequest, choice: CandidatePlan) -> Iterator[WhatIf]:
    """Yield everything that is asked about, for the best plan of a request."""
    for name, changed in _clusters(request.cluster):
        yield WhatIf(name=name, request=replace(request, cluster=changed), current_plan=choice)
    now = request.mathematics.global_sequences
    for count in (2 * now, now // 2):
        if count and (count > now or now % 2 == 0):
            other = with_batch(request, count)
            same = with_recounted_microbatches(other, choice)
            name = f"global batch {now:,} -> {count:,}"
            yield WhatIf(name=name, request=other, current_plan=same)
    larger = with_devices(request, 2 * request.cluster.num_devices)
    if larger is not None and request.pins.values_of("devices") is None:
        mesh = replace(choice.mesh, dp_shard=2 * choice.mesh.dp_shard)
        same = with_recounted_microbatches(larger, replace(choice, mesh=mesh))
        count = larger.cluster.num_devices
        yield WhatIf(name=f"devices {count // 2:,} -> {count:,}", request=larger, current_plan=same)


def with_batch(request: SearchRequest, global_sequences: int) -> SearchRequest:
    """Return the request with another global batch."""
    mathematics = replace(request.mathematics, global_sequences=global_sequences)
    entry = Entry(value=global_sequences, source="a question")
    return replace(
        request,
        one_rank_run=replace(request.one_rank_run, mathematics=mathematics),
        layers=(*request.layers, {"batch.global_sequences": entry}),
    )


def with_devices(request: SearchRequest, count: int) -> SearchRequest | None:
    """Return the request on at least so many of the same devices, None where they have no name."""
    now = request.cluster
    if not isinstance(named_cluster(now.name, ""), Cluster):
        return None
    larger = named_cluster(smallest_cluster(now.name, count), "")
    if not isinstance(larger, Cluster):
        return None
    return request_on_cluster(request, replace(larger, device=now.device))


def _clusters(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    device = cluster.device
    for times in MEMORY:
        memory = int(times * device.memory_bytes)
        yield f"memory {_percent(times)}", _with_device(cluster, memory_bytes=memory)
    if device.peak_flops:
        for times in _PEAK:
            peaks = tuple((dtype, times * peak) for dtype, peak in device.peak_flops)
            yield f"peak FLOP/s {_percent(times)}", _with_device(cluster, peak_flops=peaks)
    node = cluster.devices_per_node
    if cluster.nodes > 1:
        for times in _BANDWIDTH:
            name = f"inter-node bandwidth {_percent(times)}"
            yield name, _with_links(cluster, times, "bandwidth", lambda one: one.degree > node)
    if node > 1:
        for times in WITHIN:
            name = f"intra-node bandwidth {_percent(times)}"
            yield name, _with_links(cluster, times, "bandwidth", lambda one: one.degree <= node)
    if cluster.num_devices > 1:
        for times in _LATENCY:
            yield f"latency {_percent(times)}", _with_links(cluster, times, "latency_s")


def _percent(times: float) -> str:
    return f"x{times:g}" if times in (0.5, 2.0) else f"{100 * (times - 1):+.0f} %"


def _with_device(cluster: Cluster, **changes: object) -> Cluster:
    device: Device = replace(cluster.device, **changes)  # type: ignore[arg-type]
    return replace(cluster, device=device)


def _with_links(
    cluster: Cluster, times: float, name: str, chosen: Callable[[Link], bool] = lambda _: True
) -> Cluster:
    links = tuple(
        replace(link, **{name: times * getattr(link, name)}) if chosen(link) else link
        for link in cluster.links
    )
    return replace(cluster, links=links)
