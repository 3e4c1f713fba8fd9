# SPDX-License-Identifier: Apache-2.0
"""Peak bytes of each rank on its device and on its host, place by place of a pipeline.

All memory of a CPU rank is memory of its host. The host of a GPU holds offloaded slices, and
buffers between the GPU and files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from echelon.core.plan import Plan
from echelon.cost.bytes.held import held_buckets, held_terms
from echelon.cost.peak.offload_buffers import JOBS_AT_HAND, offload_buffer_bytes
from echelon.cost.peak.rank_peak import PeakWalk
from echelon.layout.islands import plan_and_rank
from echelon.layout.stage import pp_rank_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceMemory:
    """Hold the peak bytes of each rank at one place of a pipeline, by term."""

    num_ranks: int
    """Ranks at this place."""
    device: Mapping[str, float]
    """Bytes of the memory of a GPU."""
    host: Mapping[str, float]
    """Bytes of the memory of the host."""

    @property
    def device_bytes(self) -> float:
        """Return all bytes of the device."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> float:
        """Return all bytes of the host."""
        return sum(self.host.values())


def memory_by_place(plan: Plan, ranks: Iterable[int]) -> tuple[PlaceMemory, ...]:
    """Peak bytes of `ranks` by their place of the pipeline; parameter servers come last.

    The first rank at a place represents all ranks there.
    """
    walk, mesh = PeakWalk(plan), plan.mesh
    counts: dict[int, int] = {}
    for rank in ranks:
        place = mesh.pp if mesh.is_server(rank) else pp_rank_of(*plan_and_rank(plan, rank))
        counts[place] = counts.get(place, 0) + 1
    peaks = walk.by_place()
    memory: list[PlaceMemory] = []
    for place, count in sorted(counts.items()):
        peak = {name: size for name, size in peaks[place].terms.items() if size}
        if plan.cluster.backend == "gloo":
            memory.append(PlaceMemory(num_ranks=count, device={}, host=peak))
        else:
            host = _offloaded(plan, peaks[place].rank)
            memory.append(PlaceMemory(num_ranks=count, device=peak, host=host))
    return tuple(memory)


def _offloaded(plan: Plan, rank: int) -> dict[str, float]:
    """Bytes that a rank offloads from its GPU to the host, by term."""
    plan, rank = plan_and_rank(plan, rank)
    buckets = held_buckets(plan, pp_rank_of(plan, rank))
    terms: dict[str, float] = {}
    for term in held_terms(plan, buckets, rank):
        if term.pool == "host":
            terms[term.name] = terms.get(term.name, 0.0) + term.bytes
    plans = [bucket.plan for bucket in buckets]
    if buffers := offload_buffer_bytes(plan, plans, JOBS_AT_HAND, {"host"}):
        terms["buffers"] = float(buffers)
    return terms
