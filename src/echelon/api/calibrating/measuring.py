# SPDX-License-Identifier: Apache-2.0
"""What is measured of a machine, each measurement once: what an earlier attempt made is taken.

Kernels run on all ranks of all nodes at once. Collectives run inside of a node, on its first ranks,
and between nodes: of one rank in each, as data and pipeline ranks have them, and of whole nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from echelon.api.calibrating.place import JobRanks, MeasuredPlace
from echelon.config.files.measurements import UnfinishedMeasurements, measurement_name
from echelon.cost.fit.samples import (
    COLLECTIVES,
    Collective,
    MatmulKernel,
    MeasuredKernel,
    TimedCollective,
    TimedKernel,
    Workload,
)

JOB_TIMEOUT_S = 1800.0
LEAST_ALONE_FLOPS = 1e6
"""FLOPs of a product from which on running it alone tells how many cores ranks share."""
DEGREES = (2, 4, 8, 16, 32)  # ranks, or nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """Hold what measurements are made with, and those that there are."""

    ranks: JobRanks
    place: MeasuredPlace
    workload: Workload
    done: UnfinishedMeasurements
    say: Callable[[str], None]

    def kernels(self) -> list[TimedKernel]:
        """Return the seconds of all kernels, of some products alone too."""
        place, alone = self.place, list[MatmulKernel]()
        if place.ranks > 1 and place.backend == "gloo" and place.machine.cores is None:
            large = [one for one in self.workload.matmuls if one.flops >= LEAST_ALONE_FLOPS]
            alone = (large or list(self.workload.matmuls))[::4]
        beside = self.workload.kernels
        return self._kernels(alone, 1) + self._kernels(beside, place.ranks)

    def collectives(self) -> tuple[list[TimedCollective], list[TimedCollective]]:
        """Return the seconds of collectives inside of a node, and of those between nodes."""
        place = self.place
        inside = [*self._sizes((degree, 1) for degree in _degrees(place.ranks))]
        between = [*self._sizes(_groups_of_nodes(place))]
        wanted = [*inside, *between]
        missing = [one for one in wanted if measurement_name(one) not in self.done.found]
        made: dict[Collective, float] = {}
        if missing:
            ranks = ", ".join(map(str, sorted({one.degree for one in missing})))
            self.say(f"measuring {len(missing)} collectives of {ranks} ranks")
            from echelon.training.measure.collectives import CollectiveJob, measure_collectives

            job = CollectiveJob(
                collectives=missing,
                window_s=self.workload.window_s,
                threads=place.threads,
                journal=self.done.journal,
            )
            world = place.ranks * place.nodes
            found = self.ranks.run(measure_collectives, job, world, timeout_s=JOB_TIMEOUT_S)[0]
            made = dict(zip(missing, found, strict=True))
        timed = [
            TimedCollective(
                collective=one,
                seconds=made[one] if one in made else self.done.found[measurement_name(one)],
                fitted=one.num_bytes not in self.workload.held_out_sizes,
            )
            for one in wanted
        ]
        return timed[: len(inside)], timed[len(inside) :]

    def _kernels(self, kernels: Sequence[MeasuredKernel], running: int) -> list[TimedKernel]:
        names = {kernel: measurement_name(kernel, running=running) for kernel in kernels}
        missing = [kernel for kernel in kernels if names[kernel] not in self.done.found]
        made: dict[MeasuredKernel, float] = {}
        if missing:
            at_once = f"{running} ranks at once" if running > 1 else "one rank"
            self.say(f"measuring {len(missing)} kernels on {at_once}")
            from echelon.training.measure.kernels import KernelJob, measure_kernels

            job = KernelJob(
                kernels=missing,
                dtype=self.place.dtype,
                window_s=self.workload.window_s,
                threads=self.place.threads,
                running=running,
                journal=self.done.journal,
            )
            world = running * self.place.nodes if running == self.place.ranks else running
            found = self.ranks.run(measure_kernels, job, world, timeout_s=JOB_TIMEOUT_S)[0]
            made = dict(zip(missing, found, strict=True))
        cores = self.place.machine.cores
        # A rank's own seconds are those that it would take with a core of its own.
        share = min(1.0, cores / running) if cores else 1.0
        return [
            TimedKernel(
                kernel=kernel,
                seconds=(made[kernel] if kernel in made else self.done.found[names[kernel]])
                / share,
                running=running,
                fitted=kernel not in self.workload.held_out,
            )
            for kernel in kernels
        ]

    def _sizes(self, groups: Iterator[tuple[int, int]]) -> Iterator[Collective]:
        node = self.place.ranks
        for degree, stride in groups:
            for kind in COLLECTIVES:
                if kind == "send" and stride < node < degree:
                    continue  # Neighbours of it are in one node.
                for size in self.workload.sizes:
                    yield Collective(kind=kind, degree=degree, num_bytes=size, stride=stride)


def _degrees(most: int) -> list[int]:
    return sorted({degree for degree in (*DEGREES, most) if 2 <= degree <= most})


def _groups_of_nodes(place: MeasuredPlace) -> Iterator[tuple[int, int]]:
    """Yield degrees and strides: ranks of as many nodes, then all ranks of as many."""
    for nodes in _degrees(place.nodes):
        yield nodes, place.ranks
        if place.ranks > 1:
            yield nodes * place.ranks, 1
