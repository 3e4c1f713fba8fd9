# SPDX-License-Identifier: Apache-2.0
"""What a rehearsal has found: ranks, faults, and memory beside that of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echelon.core.errors import Problem, ProofFailed
from echelon.core.notebook import NOTEBOOK_VIEWS
from echelon.core.plan import Plan
from echelon.core.rules import Rule
from echelon.rehearsal.rank import RankRehearsal
from echelon.rehearsal.roofline import Roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalFault:
    """Say what is wrong: the rule that it breaks, where, and the ranks that do it."""

    rule: Rule
    ranks: tuple[int, ...]
    text: str

    def problem(self) -> Problem:
        """Return the fault as a problem."""
        where = f" (rank {', '.join(map(str, self.ranks))})" if self.ranks else ""
        return self.rule.problem(f"{self.text}{where}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Hold what the ranks of a plan do on GPUs, and what is wrong with it."""

    plan: Plan
    """What was rehearsed: on NCCL, and with so many microbatches."""
    num_microbatches: int
    """Microbatches of a step of the plan that was asked for."""
    ranks: tuple[RankRehearsal, ...]
    """One rank of each class; the entries of its log are not kept."""
    checked: tuple[int, ...]
    """Ranks whose logs were compared with those of their class."""
    faults: tuple[RehearsalFault, ...]
    """All that is wrong."""
    num_operations: int
    """Operations in the order that was proven."""
    planned: Mapping[int, Mapping[str, float]]
    """Bytes that the plan says each of the ranks holds at its peak, by term."""
    sent: Mapping[int, Mapping[str, int]]
    """Bytes that the plan says each of the ranks sends in a step, by axis."""
    seconds: float
    """How long the rehearsal took."""
    roofline: Roofline | None = None
    """Seconds of the counted work; None where the devices of the plan are processors."""

    @property
    def holds(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.faults

    @property
    def fullest(self) -> RankRehearsal:
        """Return the rank with the highest peak."""
        return max(self.ranks, key=lambda one: one.peak_bytes)

    def memory_error(self, rank: RankRehearsal) -> float:
        """Return by how much the plan's peak is above that of a rank, as a share of it."""
        return sum(self.planned[rank.rank].values()) / rank.peak_bytes - 1.0

    def require(self) -> None:
        """Raise ProofFailed, with a problem for each fault, unless there is none."""
        if self.faults:
            raise ProofFailed([fault.problem() for fault in self.faults])

    def to_json(self) -> dict[str, object]:
        """Return the rehearsal as a JSON object."""
        return {
            "plan": self.plan.name,
            "plan_hash": self.plan.content_hash(),
            "world_size": self.plan.mesh.world_size,
            "microbatches": {
                "rehearsed": self.plan.num_microbatches,
                "step": self.num_microbatches,
            },
            "holds": self.holds,
            "faults": [
                {"rule": one.rule.id, "ranks": list(one.ranks), "text": one.text}
                for one in self.faults
            ],
            "num_operations": self.num_operations,
            "checked_ranks": list(self.checked),
            "seconds": self.seconds,
            "roofline": None if self.roofline is None else self.roofline.to_json(),
            "ranks": [self._rank_json(one) for one in self.ranks],
        }

    def _repr_html_(self) -> str | None:
        """Return the rehearsal, as a notebook shows it: its page without a script."""
        return NOTEBOOK_VIEWS.html("rehearsal", self)

    def _rank_json(self, rank: RankRehearsal) -> dict[str, object]:
        return {
            "rank": rank.rank,
            "peak_bytes": rank.peak_bytes,
            "planned_peak_bytes": sum(self.planned[rank.rank].values()),
            "held_bytes": dict(rank.held),
            "at_peak": dict(rank.at_peak),
            "most_by_term": dict(rank.most),
            "planned_by_term": dict(self.planned[rank.rank]),
            "sent_bytes": dict(rank.sent),
            "planned_sent_bytes": dict(self.sent[rank.rank]),
            "host_reads": [
                {"action": action, "what": what, "count": count}
                for (action, what), count in rank.reads.items()
            ],
            "work": {
                task or "outside of actions": {
                    "kernels": work.kernels,
                    "bytes": work.bytes,
                    "flops": work.flops,
                }
                for task, work in rank.work.items()
            },
            "curve": [
                {"action": one.action, "kept": sum(one.kept.values()), "peak": one.peak_bytes}
                for one in rank.points
            ],
        }
