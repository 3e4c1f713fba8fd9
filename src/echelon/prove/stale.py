"""A forward pass on old values: those of a unit, or of one rank's slices, before the last update.

What is gathered before it is used can be gathered too early, or kept too long. One device runs the
same forward with the old values of each unit in turn; losses that agree name the unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from echelon.core.axis import SHARD_AXES
from echelon.core.plan import Plan
from echelon.cost.buckets import shard_degree, unit_of
from echelon.prove.checks import Evidence
from echelon.prove.diagnosis import Finding
from echelon.prove.oracle import OracleStep, build_decoder
from echelon.prove.oracle_routing import RoutingState
from echelon.prove.places import shard_axis
from echelon.prove.variants import Variant

Values = Mapping[str, torch.Tensor]


def stale_variants(evidence: Evidence, oracle: OracleStep) -> Iterator[Variant]:
    """Return the forward passes of `oracle` in which some values are those of the step before."""
    plan = evidence.reference_plan
    if not oracle.step or evidence.oracle[oracle.step - 1].skipped:
        return
    old = evidence.oracle[oracle.step - 1].before
    units: dict[str, list[str]] = {}
    for name in oracle.before:
        units.setdefault(unit_of(name), []).append(name)
    axis = shard_axis(plan) if _num_slices(plan) > 1 else ""
    for unit, names in (*units.items(), ("the whole model", list(oracle.before))):
        says = f"the forward pass uses {unit} as it was before the last update"
        yield _variant(plan, names, mixed(oracle.before, old, names), (says, axis), oracle.routing)
    specs = evidence.observed.specs
    for unit, names in units.items():
        experts = [name for name in names if specs[name].expert is not None]
        if experts:
            says = (
                f"the forward pass uses the experts of {unit} as they were before the last update"
            )
            among = "edp_shard" if shard_degree(plan, expert=True) > 1 else ""
            values = mixed(oracle.before, old, experts)
            yield _variant(plan, experts, values, (says, among), oracle.routing)
    for index in range(_num_slices(plan)):
        slices = _slices(evidence, oracle.step, index)
        for unit, names in (*units.items(), ("the whole model", list(oracle.before))):
            says = f"the forward pass uses the slice that {axis} {index} holds of {unit} as it "
            says += "was before the last update"
            values = mixed(oracle.before, old, names, slices)
            yield _variant(plan, names, values, (says, axis), oracle.routing)


def mixed(
    new: Values, old: Values, names: Sequence[str], where: Values | None = None
) -> dict[str, torch.Tensor]:
    """Return the new values, but the old ones of `names` (and `where`, true in places)."""
    values = dict(new)
    for name in names:
        values[name] = (
            old[name] if where is None else torch.where(where[name], old[name], new[name])
        )
    return values


def _variant(
    plan: Plan,
    names: Sequence[str],
    values: Mapping[str, torch.Tensor],
    told: tuple[str, str],
    routing: RoutingState,
) -> Variant:
    says, axis = told
    return Variant(
        tensor=names[0],
        finding=Finding(factor="stale", says=says, axis=axis),
        build=lambda: build_decoder(plan, values, routing=routing),
    )


def _num_slices(plan: Plan) -> int:
    return plan.mesh.degree(*SHARD_AXES) if plan.layout.zero.stage else 1


def _slices(evidence: Evidence, step: int, index: int) -> dict[str, torch.Tensor]:
    """Return which elements the ranks at place `index` of the slices update."""
    mesh, observed = evidence.plan.mesh, evidence.observed
    where = {n: torch.zeros(spec.shape, dtype=torch.bool) for n, spec in observed.specs.items()}
    for name, mask in where.items():
        for piece in observed.pieces("gradients", step, name):
            if mesh.group(piece.rank, *SHARD_AXES).index(piece.rank) == index:
                mask[piece.region] = True
    return where
