# SPDX-License-Identifier: Apache-2.0
"""One plan of a search as whole numbers, the settings that give it, and the best of them so far.

Of each mesh with its microbatch and schedule the best plan is kept.

Complexity of a plan (`complexity`): data parallelism and a ZeRO stage are there in every trainer
and are one setting. An axis that splits the model (`tp`, `cp`, `pp`, `ep`) is a way to be wrong and
to be slow on another network; sequence parallelism belongs to `tp`. Less weighs what changes no
axis: another schedule than the plain one, several stages on a rank, replicas of shards, pieces of
experts, recompute, offload.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.mesh import Mesh
from echelon.core.plan import RecomputedOperator
from echelon.cost.inputs.numbers import Array, LayoutNumbers
from echelon.cost.seconds.from_plan import schedule_index
from echelon.planner.search.legal_meshes import Columns
from echelon.planner.search.options import (
    EXACT,
    MOST_STAGE,
    ROUNDED_NUMBERS,
    RecomputeOption,
    Rounding,
    ScheduleOption,
    ZeroOption,
    redone_numbers,
)
from echelon.planner.search.pins import NO_RECOMPUTE, pin_word
from echelon.planner.search.plan_line import recompute_word
from echelon.schedule.build import PLAIN_SCHEDULE


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatePlan:
    """Hold every choice of a plan."""

    mesh: Mesh
    """Degrees of all axes."""
    sequence_parallel: bool
    """Whether the residual stream is cut over `tp`."""
    context: str
    """The kind of context parallelism."""
    ulysses: int
    """Context ranks that exchange heads."""
    expert_tp: int
    """Pieces of each expert."""
    microbatch: int
    """Sequences of a microbatch."""
    microbatches: int
    """Microbatches of a data-parallel rank in a step."""
    zero: int
    """The ZeRO stage."""
    reshard: bool
    """Whether parameters are freed after each use, at stage 3."""
    offload: bool
    """Whether optimizer state is in the memory of the host."""
    secondary: bool = False
    """Whether nodes keep slices of what was gathered, at stage 3."""
    rounding: Rounding = EXACT
    """How gathers and sums round, where that is pinned."""
    schedule: str
    """The pipeline schedule."""
    virtual: int
    """Stages on each pipeline rank."""
    recompute: int
    """Every how many blocks one runs forward again; 0 for none."""
    recomputed_share: float
    """The share of blocks that do."""
    operators: tuple[RecomputedOperator, ...] = ()
    """Operators of the other blocks that do."""

    @property
    def devices(self) -> int:
        """Return how many devices it takes."""
        return self.mesh.world_size

    @property
    def keeps_slices(self) -> bool:
        """Return whether nodes have something to keep: of units that are gathered again."""
        return self.secondary and self.zero == MOST_STAGE and self.reshard

    def settings(self, *, has_experts: bool) -> dict[str, object]:
        """Return the settings of a run file that say this; what has no effect is left out."""
        mesh = self.mesh
        found: dict[str, object] = {
            "mesh.pp": mesh.pp,
            "mesh.dp_replicate": mesh.dp_replicate,
            "mesh.dp_shard": mesh.dp_shard,
            "mesh.cp": mesh.cp,
            "mesh.tp": mesh.tp,
            "mesh.sequence_parallel": self.sequence_parallel,
            "batch.microbatch_sequences": self.microbatch,
            "zero.stage": self.zero,
            "pipeline.schedule": self.schedule,
            "pipeline.virtual_stages": self.virtual,
        }
        if self.zero == MOST_STAGE:
            found["zero.reshard_after_forward"] = "always" if self.reshard else "never"
        if self.keeps_slices:
            found["zero.secondary"] = True
        if self.offload:
            found["zero.optimizer_offload"] = "host"
        found |= self.rounding.settings()
        if self.recompute != NO_RECOMPUTE:
            found |= {"recompute.policy": "full", "recompute.every": self.recompute}
        elif self.operators:
            found["recompute.policy"] = "selective"
        if self.operators:
            found["recompute.operators"] = list(self.operators)
        if mesh.cp > 1:
            found["context.kind"] = self.context
            if CONTEXT_KINDS[self.context].exchange == "inner":
                found["context.ulysses_degree"] = self.ulysses
        if has_experts:
            found |= {"mesh.ep": mesh.ep, "experts.expert_tp": self.expert_tp}
        return found

    def pin_value(self, name: str) -> str:
        """Return what it has of something that can be pinned, as a pin says it."""
        if name == "recompute":
            return recompute_word(self.recompute, self.operators)
        if hasattr(self.rounding, name):
            return str(getattr(self.rounding, name))
        return pin_word(name, getattr(self.mesh if hasattr(self.mesh, name) else self, name))

    def numbers(self) -> LayoutNumbers:
        """Return the choice as the formulas read it."""
        return LayoutNumbers(
            **{name: float(getattr(self.mesh, name)) for name in _DEGREES},
            **{name: float(getattr(self, name)) for name in _OWN_NUMBERS},
            **{name: getattr(self.rounding, name) for name in ROUNDED_NUMBERS},
            secondary=float(self.keeps_slices),
            gathered=float(CONTEXT_KINDS[self.context].gathers_keys),
            schedule=schedule_index(self.schedule),
            recompute=self.recomputed_share,
            **redone_numbers(self.operators),
        )


_DEGREES = ("tp", "cp", "pp", "dp_shard", "dp_replicate", "ep")
_OWN_NUMBERS = (
    *("expert_tp", "sequence_parallel", "ulysses", "microbatch", "microbatches", "virtual"),
    *("zero", "reshard", "offload"),
)
"""Fields of a mesh, and of a plan, that the formulas read under the same name."""

FINALISTS = 50  # candidates

CandidateGroup = tuple[int, int, int, int]
"""Devices, the row of a mesh, a schedule and its virtual stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredCandidate:
    """Hold a plan that fits: what it is worth (less is better), and where its numbers stand."""

    value: float
    columns: Columns
    row: int
    zero_option: ZeroOption
    schedule_option: ScheduleOption
    recompute: RecomputeOption

    def candidate(self) -> CandidatePlan:
        """Return the plan as whole numbers."""
        row = {name: int(column[self.row]) for name, column in self.columns.items()}
        shares, again = self.zero_option, self.recompute
        return CandidatePlan(
            mesh=Mesh(
                pp=row["pp"],
                cp=row["cp"],
                tp=row["tp"],
                ep=row["ep"],
                dp_replicate=shares.dp_replicate,
                dp_shard=shares.dp_shard,
            ),
            sequence_parallel=bool(row["sequence_parallel"]),
            context=list(CONTEXT_KINDS)[row["kind"]],
            **{name: row[name] for name in ("ulysses", "expert_tp", "microbatch", "microbatches")},
            zero=shares.zero,
            reshard=bool(shares.reshard),
            offload=bool(shares.offload),
            secondary=bool(shares.secondary),
            rounding=shares.rounding,
            schedule=self.schedule_option.name,
            virtual=self.schedule_option.virtual,
            recompute=again.every,
            recomputed_share=again.share,
            operators=again.operators,
        )


@dataclass(slots=True)
class BestCandidates:
    """Keep the best plan of each group, and say what a plan must beat to be among the first."""

    keep: int = FINALISTS
    found: dict[CandidateGroup, ScoredCandidate] = field(
        default_factory=dict[CandidateGroup, ScoredCandidate]
    )
    threshold: float = inf

    def add(self, group: CandidateGroup, scored: ScoredCandidate) -> None:
        """Take a plan where it beats the one of its group."""
        known = self.found.get(group)
        if known is None or scored.value < known.value:
            self.found[group] = scored

    def drop_surplus(self) -> None:
        """Drop what is not among the first, and raise the bar."""
        if len(self.found) < self.keep:
            return
        ranked = sorted(self.found.items(), key=lambda item: item[1].value)[: self.keep]
        self.found = dict(ranked)
        self.threshold = ranked[-1][1].value

    def ranked(self) -> list[ScoredCandidate]:
        """Return the plans kept, best first."""
        return sorted(self.found.values(), key=lambda scored: scored.value)[: self.keep]


def best_of_groups(values: Array, groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where the least value of each group stands."""
    order = np.lexsort((values, groups))
    ordered = groups[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return order[first]


SPLITTING_AXES = ("tp", "cp", "pp", "ep")
"""Axes over which the model is split."""

Complexity: TypeAlias = tuple[int, int]
"""How many axes split the model, and how many kinds of machinery there are beside; less is
simpler."""


def splitting_axes(choice: CandidatePlan) -> tuple[str, ...]:
    """Return the axes over which a plan splits the model."""
    return tuple(axis for axis in SPLITTING_AXES if getattr(choice.mesh, axis) > 1)


def machinery(choice: CandidatePlan) -> tuple[str, ...]:
    """Return what a plan has beside its axes, in words."""
    mesh = choice.mesh
    found = {
        choice.schedule: mesh.pp > 1 and choice.schedule != PLAIN_SCHEDULE,
        "several stages on a rank": choice.virtual > 1,
        "replicas of shards": mesh.dp_replicate > 1 and mesh.dp_shard > 1,
        "pieces of experts": choice.expert_tp > 1,
        "recompute": choice.recompute > 0 or bool(choice.operators),
        "offload": choice.offload,
        "secondary slices": choice.keeps_slices,
    }
    return tuple(name for name, there in found.items() if there)


def complexity(choice: CandidatePlan) -> Complexity:
    """Return how much a plan asks of its user."""
    return len(splitting_axes(choice)), len(machinery(choice))
