"""Slices of gradients that stand on the wrong rank: what one holds is what another should."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from echelon.core.axis import SHARD_AXES, Axis
from echelon.cost.buckets import shard_degree, slice_index
from echelon.prove.checks import Evidence
from echelon.prove.diagnosis import Finding
from echelon.prove.factors import EXPLAINED
from echelon.prove.oracle import OracleStep
from echelon.prove.places import shard_axis
from echelon.prove.ranks import Piece

_LEAST = 4
"""Elements in a row that are not found elsewhere by chance."""


def slices_of_others(
    evidence: Evidence, oracle: OracleStep, wrong: Sequence[Piece]
) -> Iterator[Finding]:
    """Find the right gradient of another slice in a wrong piece."""
    plan = evidence.plan
    expert = bool(wrong) and evidence.observed.specs[wrong[0].name].expert is not None
    if shard_degree(plan, expert=expert) == 1:
        return
    for piece in wrong[:4]:
        owners = sorted(_owners(evidence, oracle, piece) - {piece.rank})
        if not owners:
            continue
        if expert:
            place, other = (slice_index(plan, r, expert=True) for r in (piece.rank, owners[0]))
            says = f"edp_shard {place} holds the slice of edp_shard {other}: slices are permuted"
            yield Finding(factor="slices permuted", says=says, axis="edp_shard")
            return
        group = [r for r in owners if r in plan.mesh.group(piece.rank, *SHARD_AXES)]
        other = group[0] if group else owners[0]
        here, there = plan.mesh.coordinates(piece.rank), plan.mesh.coordinates(other)
        moved = [axis.value for axis in SHARD_AXES if here[axis] != there[axis]]
        names = [f"{a.value} {here[a]}" for a in SHARD_AXES if plan.mesh.degree(a) > 1]
        others = [f"{a.value} {there[a]}" for a in SHARD_AXES if plan.mesh.degree(a) > 1]
        says = f"{' '.join(names)} holds the slice of {' '.join(others)}: slices are permuted"
        axis = " and ".join(moved) if plan.mesh.degree(Axis.CP) > 1 else shard_axis(plan)
        yield Finding(factor="slices permuted", says=says, axis=axis)
        return


def _owners(evidence: Evidence, oracle: OracleStep, piece: Piece) -> set[int]:
    """Return the ranks that should hold what a piece begins with, by what they say they hold."""
    start = piece.tensor.reshape(-1)[: 2 * _LEAST].double()
    if start.numel() < _LEAST or not float(start.norm()):
        return set()
    for name, gradient in oracle.gradients.items():
        flat = gradient.double().reshape(-1)
        if flat.numel() < start.numel():
            continue
        near = (flat.unfold(0, start.numel(), 1) - start).norm(dim=1) < EXPLAINED * start.norm()
        for at in near.nonzero()[:1, 0].tolist():
            whose = torch.zeros(flat.numel(), dtype=torch.bool)
            whose[at] = True
            first = whose.view(gradient.shape)
            return {
                other.rank
                for other in evidence.observed.pieces("gradients", oracle.step, name)
                if bool(first[other.region].any())
            }
    return set()
