# SPDX-License-Identifier: Apache-2.0
"""How much a plan asks of its user: axes that split the model, and kinds of machinery.

Data parallelism and a ZeRO stage are there in every trainer and are one setting. An axis that
splits the model (`tp`, `cp`, `pp`, `ep`) is a way to be wrong and to be slow on another network;
sequence parallelism belongs to `tp`. Less weighs what changes no axis: another schedule than the
plain one, several stages on a rank, replicas of shards, pieces of experts, recompute, offload.
"""

from __future__ import annotations

from typing import TypeAlias

from echelon.planner.search.candidate import CandidatePlan
from echelon.schedule.build import PLAIN_SCHEDULE

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
