# SPDX-License-Identifier: Apache-2.0
"""How stale the gradients of each worker were, from the events of asynchronous servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from echelon.core.choices.updates import AppliedGradient
from echelon.core.event import APPLY
from echelon.core.plan import Plan
from echelon.telemetry.events import events_files
from echelon.telemetry.json_lines import read_entries


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStaleness:
    """Say how many gradients of a worker were how stale, on all servers together."""

    worker: int
    """The worker."""
    histogram: Mapping[int, int]
    """Staleness -> gradients that had it."""

    @property
    def num_applied(self) -> int:
        """Return how many were applied."""
        return sum(self.histogram.values())

    @property
    def mean(self) -> float:
        """Return the mean staleness."""
        total = sum(staleness * count for staleness, count in self.histogram.items())
        return total / max(1, self.num_applied)


def staleness_of_run(run_dir: Path, plan: Plan) -> tuple[WorkerStaleness, ...]:
    """Return the staleness of each worker; nothing where no server applies gradients one by one.

    A step that a resumed run took again counts as it was taken last.
    """
    updates = plan.mathematics.updates
    if not updates.is_asynchronous:
        return ()
    found: dict[tuple[int, int, int], int] = {}
    for rank in plan.mesh.server_ranks:
        entries = chain.from_iterable(map(read_entries, events_files(run_dir, rank)))
        for entry in entries:
            if entry.text("kind") != APPLY:
                continue
            one = AppliedGradient.from_event(entry.text("name"))
            if one is not None:
                found[rank, one.worker, one.step] = one.staleness
    by_worker = {worker: Counter[int]() for worker in range(plan.mesh.num_workers)}
    for (_, worker, _), staleness in found.items():
        by_worker[worker][staleness] += 1
    return tuple(
        WorkerStaleness(worker=worker, histogram=dict(sorted(histogram.items())))
        for worker, histogram in by_worker.items()
    )
