# SPDX-License-Identifier: Apache-2.0
"""What a wrong gradient looks like: compared with sums over ranks, parts of microbatches, shards.

The first explanation that fits to rounding is the one that is told; they are tried from the most
telling to the least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from echelon.proof.claims.checks import Check, Evidence, dp_rank_of
from echelon.proof.claims.wrong_factors import (
    EXPLAINED,
    fit_basis,
    fit_factor,
    known_factors,
    name_factor,
    relative_residual,
)
from echelon.proof.diagnose.context import (
    attribute_to_head_copies,
    context_rank_weights,
    gradients_of_keys,
)
from echelon.proof.diagnose.diagnosis import (
    ProofFinding,
    group_of,
    named_groups,
    with_distinguishing_axis,
)
from echelon.proof.diagnose.experts import gradients_of_experts
from echelon.proof.diagnose.microbatch_weights import (
    WrongGradient,
    explain_weights,
    fit_microbatch_weights,
    replica_gradients,
    sum_of,
)
from echelon.proof.diagnose.misplaced import slices_of_others, swapped_messages
from echelon.proof.diagnose.norm_layers import missing_rows
from echelon.proof.diagnose.places import describe_slice, told_by_slice, wrong_elements
from echelon.proof.mistakes.threads import weighted_replicas
from echelon.proof.oracle.oracle import contributions
from echelon.proof.ranks import ObservedShard


def explain_gradient(evidence: Evidence, failure: Check) -> ProofFinding:
    """Return what is wrong with a gradient, and the ranks that hold it wrong."""
    step, name = failure.step, failure.subject
    oracle, observed = evidence.oracle[step], evidence.observed
    right = oracle.gradients[name]
    expert = observed.specs[name].expert is not None
    pieces = observed.shards("gradients", step, name)
    allowed = evidence.tolerance.allowed("gradients", step, name) * float(right.norm())
    wrong = [p for p in pieces if not float((p.tensor - right[p.region]).norm()) <= allowed / 2]
    # A slice may be a few elements of a row, from which little can be told.
    wrong.sort(key=lambda piece: -piece.tensor.numel())
    gradient = WrongGradient(
        evidence=evidence,
        oracle=oracle,
        name=name,
        shards=pieces,
        wrong=wrong or pieces,
        known=known_factors(evidence.plan, oracle, expert=expert),
    )
    ranks = tuple(sorted({piece.rank for piece in gradient.wrong}))
    says = "another function: no factor, sum, shard or microbatch explains it"
    finding = next(_findings(gradient), None)
    if finding is None:
        share = evidence.tolerance.allowed("gradients", step, name)
        odd = wrong_elements(observed.whole("gradients", step, name), right, share)
        finding = told_by_slice(ProofFinding("none", says), describe_slice(odd))
    holders = {piece.rank for piece in pieces}
    told = with_distinguishing_axis(evidence.plan, finding, ranks, holders, expert=expert)
    return replace(told, ranks=ranks)


def _findings(gradient: WrongGradient) -> Iterator[ProofFinding]:
    if not all(bool(piece.tensor.isfinite().all()) for piece in gradient.wrong):
        yield ProofFinding("not finite", "not finite")
    for explain in (
        _missing_sum,
        _scalar,
        weighted_replicas,
        _microbatch_mixture,
        gradients_of_experts,
        context_rank_weights,
        gradients_of_keys,
        slices_of_others,
        _other_shards,
        swapped_messages,
        missing_rows,
    ):
        yield from explain(gradient)


def _missing_sum(gradient: WrongGradient) -> Iterator[ProofFinding]:
    """Find copies that differ along one axis and, where they do, add up to the right gradient.

    Of a weight that every rank has whole, some rows may be used by all heads alike, others not.
    """
    plan = gradient.evidence.plan
    expert = gradient.spec.expert is not None
    by_place = {(piece.rank, piece.offset): piece for piece in gradient.wrong}
    first = gradient.wrong[0]
    for axis, groups in named_groups(plan, expert=expert):
        group = group_of(groups, first.rank)
        copies = [by_place.get((rank, first.offset)) for rank in group]
        held = [piece.tensor for piece in copies if piece is not None]
        if len(held) < 2 or all(torch.equal(held[0], other) for other in held[1:]):
            continue
        if any(tensor.shape != held[0].shape for tensor in held):
            continue
        right = gradient.right[first.region]
        alike = torch.stack([other == held[0] for other in held]).all(0)
        residual = relative_residual(torch.where(alike, held[0], sum_of(held)).double(), right)
        if residual < EXPLAINED:
            some = " in some rows" * bool(alike.any())
            says = f"copies differ along {axis}{some} and add up to the right one there: "
            says += "their sum is missing"
            yield ProofFinding("missing sum", says, axis, residual=residual)


def _scalar(gradient: WrongGradient) -> Iterator[ProofFinding]:
    for piece in gradient.wrong:
        right = gradient.right[piece.region]
        if not float(right.norm()):
            continue
        if not float(piece.tensor.norm()):
            yield ProofFinding("zero", "zero", value=0.0)
            return
        factor, residual = fit_factor(piece.tensor, right)
        if residual < EXPLAINED and not math.isclose(factor, 1.0, rel_tol=EXPLAINED):
            named = name_factor(factor, gradient.known, residual)
            yield attribute_to_head_copies(gradient.evidence.plan, gradient.name, named)
            return


def _microbatch_mixture(gradient: WrongGradient) -> Iterator[ProofFinding]:
    """Find the weights of the microbatches of all replicas, and of the step before."""
    evidence, step = gradient.evidence, gradient.oracle.step
    parts = contributions(evidence.reference_plan, gradient.oracle)
    for piece in gradient.wrong[:4]:
        before = None
        if step:
            before = evidence.oracle[step - 1].gradients[gradient.name][piece.region]
        own = {slot: part[gradient.name][piece.region] for slot, part in parts.items()}
        mixture = fit_microbatch_weights(piece.tensor, own, before)
        if mixture is None or mixture.right:
            continue
        served = evidence.plan.mesh.is_server(piece.rank)
        dp_rank = None if served else dp_rank_of(evidence.plan, piece.rank)
        finding = explain_weights(mixture, gradient, dp_rank)
        if finding is None:
            told = ", ".join(f"({r}, {m}): {w:.4g}" for (r, m), w in mixture.weights.items())
            says = f"a sum of microbatches (dp rank, microbatch) with other weights than 1: {told}"
            residual = mixture.residual
            finding = ProofFinding("microbatches weighted", says, "dp", residual=residual)
        yield finding
        return


def _other_shards(gradient: WrongGradient) -> Iterator[ProofFinding]:
    """Find a shard that is made of other tensor ranks' shards: a wrong group, or a wrong slice."""
    plan, spec = gradient.evidence.plan, gradient.spec
    if spec.split_dim is None or plan.mesh.tp == 1 or spec.expert is not None:
        return
    replicas = replica_gradients(gradient, gradient.name)
    dim, tp = spec.split_dim, plan.mesh.tp
    local = spec.local_shape(tp)[dim]
    for piece in gradient.wrong[:4]:
        own = piece.offset[dim] // local
        cut = [
            _pad(replica, dim, local * tp)[_moved(piece, dim, (slot - own) * local)]
            for replica in replicas
            for slot in range(tp)
        ]
        weights, residual = fit_basis(piece.tensor, cut)
        if residual < EXPLAINED:
            slots = [(dp_rank, slot) for dp_rank in range(plan.mesh.dp) for slot in range(tp)]
            mixed = dict(zip(slots, weights, strict=True))
            yield _name_mixture(mixed, own, plan.mesh.dp, residual)
            return


def _moved(piece: ObservedShard, dim: int, distance: int) -> tuple[slice, ...]:
    """Return the region of a piece, moved along a dim."""
    region = list(piece.region)
    region[dim] = slice(region[dim].start + distance, region[dim].stop + distance)
    return tuple(region)


def _pad(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return a vocabulary dim padded with zeros, as ranks hold it."""
    shape = list(tensor.shape)
    shape[dim] = size - tensor.shape[dim]
    return torch.cat((tensor, tensor.new_zeros(shape)), dim=dim)


def _name_mixture(
    mixed: dict[tuple[int, int], float], own: int, dp: int, residual: float
) -> ProofFinding:
    used = sorted({slot for (_, slot), weight in mixed.items() if abs(weight) > EXPLAINED})
    if own not in used:
        says = f"the shard of tp {own} holds that of tp {used}: shards are permuted"
        return ProofFinding("shards permuted", says, "tp", residual=residual)
    lost = [r for r in range(dp) if abs(mixed[r, own]) <= EXPLAINED]
    says = f"the shard of tp {own} was summed with those of tp {used}: the wrong group"
    if lost:
        says += f", while the parts of dp {lost} are missing"
    return ProofFinding("wrong group", says, "tp", residual=residual)
