# SPDX-License-Identifier: Apache-2.0
"""A forward pass on old values: those of a unit, or of one rank's slices, before the last update.

What is gathered before it is used can be gathered too early, or kept too long. One device runs the
same forward with the old values of each unit in turn; losses that agree name the unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from echelon.core.axis import SHARD_AXES
from echelon.layout.buckets import shard_degree, unit_of
from echelon.proof.claims.checks import Evidence
from echelon.proof.diagnose.diagnosis import ProofFinding, index_in_group, shard_axis
from echelon.proof.mistakes.forward import Values, Variant
from echelon.proof.oracle.oracle import OracleStep


def outdated_parameter_variants(evidence: Evidence, oracle: OracleStep) -> Iterator[Variant]:
    """Return the forward passes of `oracle` in which some values are those of the step before."""
    plan = evidence.reference_plan
    if not oracle.step or evidence.oracle[oracle.step - 1].skipped:
        return
    old, new = evidence.oracle[oracle.step - 1].before, oracle.before
    units: dict[str, list[str]] = {}
    for name in new:
        units.setdefault(unit_of(name), []).append(name)
    scopes = {**units, "the whole model": list(new)}
    num_slices = plan.mesh.degree(*SHARD_AXES) if plan.layout.zero.stage else 1
    axis = shard_axis(plan) if num_slices > 1 else ""

    def variant(
        what: str, names: Sequence[str], axis: str, was: str, where: Values | None = None
    ) -> Variant:
        says = f"the forward pass uses {what} as {was} before the last update"
        finding = ProofFinding("stale", says, axis, tensor=names[0])
        return Variant(finding, values=with_old_values(new, old, names, where))

    for unit, names in scopes.items():
        yield variant(unit, names, axis, "it was")
    among = "edp_shard" if shard_degree(plan, expert=True) > 1 else ""
    for unit, names in units.items():
        experts = [name for name in names if evidence.observed.specs[name].expert is not None]
        if experts:
            yield variant(f"the experts of {unit}", experts, among, "they were")
    for index in range(num_slices if num_slices > 1 else 0):
        slices = _slices(evidence, oracle.step, index)
        for unit, names in scopes.items():
            what = f"the slice that {axis} {index} holds of {unit}"
            yield variant(what, names, axis, "it was", slices)


def with_old_values(
    new: Values, old: Values, names: Sequence[str], where: Values | None = None
) -> dict[str, torch.Tensor]:
    """Return the new values, but the old ones of `names` (and `where`, true in places)."""
    changed = {
        name: old[name] if where is None else torch.where(where[name], old[name], new[name])
        for name in names
    }
    return {**new, **changed}


def _slices(evidence: Evidence, step: int, index: int) -> dict[str, torch.Tensor]:
    """Return which elements the ranks at place `index` of the slices update."""
    observed = evidence.observed
    where = {n: torch.zeros(spec.shape, dtype=torch.bool) for n, spec in observed.specs.items()}
    for name, mask in where.items():
        for piece in observed.shards("gradients", step, name):
            if index_in_group(evidence.plan, piece.rank, SHARD_AXES) == index:
                mask[piece.region] = True
    return where
