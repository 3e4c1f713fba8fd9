# SPDX-License-Identifier: Apache-2.0
"""Gradients that are right elsewhere: of another microbatch, or of another rank's slice.

Where gradients of activations went to the wrong microbatch on their way between stages, what a
stage adds up is no sum of what microbatches give: each weight gradient has the input of one
microbatch and the output gradient of another. So the exchange is made on one device, for every pair
of microbatches at every boundary, and compared. A slice on the wrong rank holds what another rank
should.

Shape suffixes: B sequences of the global batch, T positions, N = T * B, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import torch

from echelon.core.axis import SHARD_AXES, Axis
from echelon.core.plan import Plan
from echelon.layout.buckets import shard_degree, slice_index
from echelon.proof.claims.wrong_factors import EXPLAINED, relative_residual
from echelon.proof.diagnose.diagnosis import ProofFinding, shard_axis
from echelon.proof.diagnose.microbatch_weights import WrongGradient
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.losses import whole_loss
from echelon.proof.oracle.oracle import OracleStep, build_decoder
from echelon.proof.ranks import ObservedShard

_MOST_MICROBATCHES = 8
"""Pairs are tried one by one; a proof that was shrunk has few."""


def swapped_messages(gradient: WrongGradient) -> Iterator[ProofFinding]:
    """Find two microbatches whose gradients changed places where they entered a stage."""
    plan, reference = gradient.evidence.plan, gradient.evidence.reference_plan
    piece = gradient.wrong[0]
    if plan.mesh.pp == 1 or plan.num_microbatches > _MOST_MICROBATCHES:
        return
    for stage, layer in _ends(plan):
        exchanged = _exchanged(reference, gradient.oracle, gradient.name, layer)
        for (one, other), found in exchanged:
            residual = relative_residual(piece.tensor.double(), found[piece.region])
            if residual < EXPLAINED:
                says = (
                    f"the gradients that stage {stage + 1} gives to stage {stage} changed places: "
                    f"microbatch {one} got that of {other}, and {other} that of {one}"
                )
                yield ProofFinding("order", says, "pp", residual=residual)
                return


def _ends(plan: Plan) -> Iterator[tuple[int, int]]:
    """Yield each stage that another one follows, with the last block that has run by its end."""
    last = None
    for stage, blocks in enumerate(plan.layout.pipeline.stages[:-1]):
        last = blocks[-1] if blocks else last
        if last is not None:
            yield stage, last


def _exchanged(
    plan: Plan, oracle: OracleStep, name: str, layer: int
) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
    """Yield the gradient of `name` for each pair that changes places after block `layer`."""
    model = build_decoder(plan, oracle.before, routing=oracle.routing, rounding=oracle.rounding)
    kept: list[torch.Tensor] = []
    model.layers[str(layer)].register_forward_hook(lambda *found: kept.append(found[-1]))
    batch = global_batch(plan, oracle.step)
    loss = whole_loss(plan, model, oracle)
    (h_ND,) = kept
    parameter = model.get_parameter(name)
    (dh_ND,) = torch.autograd.grad(loss, h_ND, retain_graph=True)

    def from_above(dh: torch.Tensor) -> torch.Tensor | None:
        (found,) = torch.autograd.grad(h_ND, parameter, dh, retain_graph=True, allow_unused=True)
        return found

    right = from_above(dh_ND)
    if right is None:  # it is above the boundary
        return
    dh_TBD = dh_ND.view(-1, len(batch.sample_ids), dh_ND.shape[1])
    for one, other in combinations(range(plan.num_microbatches), 2):
        wrong = from_above(_swapped(plan, dh_TBD, one, other).reshape_as(dh_ND))
        assert wrong is not None
        yield (one, other), oracle.gradients[name] + (wrong - right)


def _swapped(plan: Plan, dh_TBD: torch.Tensor, one: int, other: int) -> torch.Tensor:
    """Return dh with the rows of two microbatches exchanged, on every replica."""
    rows_B = torch.arange(dh_TBD.shape[1]).view(plan.mesh.dp, plan.num_microbatches, -1)
    rows_B[:, [one, other]] = rows_B[:, [other, one]]
    return dh_TBD[:, rows_B.flatten()]


_LEAST = 4
"""Elements in a row that are not found elsewhere by chance."""


def slices_of_others(gradient: WrongGradient) -> Iterator[ProofFinding]:
    """Find the right gradient of another slice in a wrong piece."""
    plan, expert = gradient.evidence.plan, gradient.spec.expert is not None
    if shard_degree(plan, expert=expert) == 1:
        return
    for piece in gradient.wrong[:4]:
        owners = sorted(_owners(gradient, piece) - {piece.rank})
        if not owners:
            continue
        if expert:
            place, other = (slice_index(plan, r, expert=True) for r in (piece.rank, owners[0]))
            says = f"edp_shard {place} holds the slice of edp_shard {other}: slices are permuted"
            yield ProofFinding("slices permuted", says, "edp_shard")
            return
        group = [r for r in owners if r in plan.mesh.group(piece.rank, *SHARD_AXES)]
        other = group[0] if group else owners[0]
        here, there = plan.mesh.coordinates(piece.rank), plan.mesh.coordinates(other)
        moved = [axis.value for axis in SHARD_AXES if here[axis] != there[axis]]
        cut = [axis for axis in SHARD_AXES if plan.mesh.degree(axis) > 1]
        name, whose = (" ".join(f"{a.value} {at[a]}" for a in cut) for at in (here, there))
        says = f"{name} holds the slice of {whose}: slices are permuted"
        axis = " and ".join(moved) if plan.mesh.degree(Axis.CP) > 1 else shard_axis(plan)
        yield ProofFinding("slices permuted", says, axis)
        return


def _owners(gradient: WrongGradient, piece: ObservedShard) -> set[int]:
    """Return the ranks that should hold what a piece begins with, by what they say they hold."""
    start = piece.tensor.reshape(-1)[: 2 * _LEAST].double()
    if start.numel() < _LEAST or not float(start.norm()):
        return set()
    observed, oracle = gradient.evidence.observed, gradient.oracle
    for name, right in oracle.gradients.items():
        flat = right.double().reshape(-1)
        if flat.numel() < start.numel():
            continue
        near = (flat.unfold(0, start.numel(), 1) - start).norm(dim=1) < EXPLAINED * start.norm()
        for at in near.nonzero()[:1, 0].tolist():
            whose = torch.zeros(flat.numel(), dtype=torch.bool)
            whose[at] = True
            first = whose.view(right.shape)
            others = observed.shards("gradients", oracle.step, name)
            return {other.rank for other in others if bool(first[other.region].any())}
    return set()
