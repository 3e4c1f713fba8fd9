"""What a wrong gradient looks like: compared with sums over ranks, parts of microbatches, shards.

The first explanation that fits to rounding is the one that is told; they are tried from the most
telling to the least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from echelon.prove.checks import Evidence, dp_rank_of
from echelon.prove.diagnose_context import gradients_of_keys, parts_of_context, told_of_copies
from echelon.prove.diagnose_experts import gradients_of_experts
from echelon.prove.diagnose_messages import swapped_messages
from echelon.prove.diagnose_slices import slices_of_others
from echelon.prove.diagnosis import Finding
from echelon.prove.factors import (
    EXPLAINED,
    Factor,
    fit_basis,
    fit_factor,
    known_factors,
    name_factor,
    relative_residual,
)
from echelon.prove.microbatch_weights import read_weights, sum_of, unmix
from echelon.prove.oracle import OracleStep, Slot, contributions
from echelon.prove.places import group_of, narrowed, telling_groups
from echelon.prove.ranks import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongGradient:
    """Hold one wrong gradient and all that it is compared with."""

    evidence: Evidence
    oracle: OracleStep
    name: str
    pieces: Sequence[Piece]
    wrong: Sequence[Piece]
    known: Sequence[Factor]

    @property
    def right(self) -> torch.Tensor:
        """Return the gradient of one device."""
        return self.oracle.gradients[self.name]


def explain_gradient(evidence: Evidence, step: int, name: str) -> tuple[Finding, tuple[int, ...]]:
    """Return what is wrong with the gradient of `name`, and the ranks that hold it wrong."""
    oracle = evidence.oracle[step]
    right = oracle.gradients[name]
    expert = evidence.observed.specs[name].expert is not None
    pieces = evidence.observed.pieces("gradients", step, name)
    allowed = evidence.tolerance.allowed("gradients", step, name) * float(right.norm())
    wrong = [p for p in pieces if not float((p.tensor - right[p.region]).norm()) <= allowed / 2]
    # A slice may be a few elements of a row, from which little can be told.
    wrong.sort(key=lambda piece: -piece.tensor.numel())
    gradient = WrongGradient(
        evidence=evidence,
        oracle=oracle,
        name=name,
        pieces=pieces,
        wrong=wrong or pieces,
        known=known_factors(evidence.plan, oracle, expert=expert),
    )
    ranks = tuple(sorted({piece.rank for piece in gradient.wrong}))
    finding = next(_findings(gradient), None) or Finding(
        factor="none", says="another function: no factor, sum, shard or microbatch explains it"
    )
    right_ranks = {piece.rank for piece in gradient.pieces}
    return narrowed(evidence.plan, finding, ranks, right_ranks, expert=expert), ranks


def _findings(gradient: WrongGradient) -> Iterator[Finding]:
    yield from _not_finite(gradient)
    yield from _missing_sum(gradient)
    yield from _scalar(gradient)
    yield from _mixture(gradient)
    one = gradient.evidence, gradient.oracle, gradient.name, gradient.wrong
    yield from gradients_of_experts(*one)
    yield from parts_of_context(*one)
    yield from gradients_of_keys(*one)
    yield from slices_of_others(gradient.evidence, gradient.oracle, gradient.wrong)
    yield from _other_shards(gradient)
    yield from _messages(gradient)


def _not_finite(gradient: WrongGradient) -> Iterator[Finding]:
    if not all(bool(piece.tensor.isfinite().all()) for piece in gradient.wrong):
        yield Finding(factor="not finite", says="not finite")


def _missing_sum(gradient: WrongGradient) -> Iterator[Finding]:
    """Find copies that differ along one axis and add up to the right gradient."""
    plan = gradient.evidence.plan
    expert = gradient.evidence.observed.specs[gradient.name].expert is not None
    by_place = {(piece.rank, piece.offset): piece for piece in gradient.wrong}
    first = gradient.wrong[0]
    for axis, groups in telling_groups(plan, expert=expert):
        group = group_of(groups, first.rank)
        copies = [by_place.get((rank, first.offset)) for rank in group]
        held = [piece.tensor for piece in copies if piece is not None]
        if len(held) < 2 or all(torch.equal(held[0], other) for other in held[1:]):
            continue
        if any(tensor.shape != held[0].shape for tensor in held):
            continue
        right = gradient.right[first.region]
        residual = relative_residual(sum_of(held).double(), right)
        if residual < EXPLAINED:
            says = f"copies differ along {axis} and add up to the right one: their sum is missing"
            yield Finding(factor="missing sum", says=says, axis=axis, residual=residual)


def _scalar(gradient: WrongGradient) -> Iterator[Finding]:
    for piece in gradient.wrong:
        right = gradient.right[piece.region]
        if not float(right.norm()):
            continue
        if not float(piece.tensor.norm()):
            yield Finding(factor="zero", says="zero", value=0.0)
            return
        factor, residual = fit_factor(piece.tensor, right)
        if residual < EXPLAINED and not math.isclose(factor, 1.0, rel_tol=EXPLAINED):
            named = name_factor(factor, gradient.known, residual)
            yield told_of_copies(gradient.evidence.plan, gradient.name, named)
            return


def _mixture(gradient: WrongGradient) -> Iterator[Finding]:
    """Find the weights of the microbatches of all replicas, and of the step before."""
    evidence, step = gradient.evidence, gradient.oracle.step
    parts = contributions(evidence.reference_plan, gradient.oracle)
    for piece in gradient.wrong[:4]:
        before = None
        if step:
            before = evidence.oracle[step - 1].gradients[gradient.name][piece.region]
        own = {slot: part[gradient.name][piece.region] for slot, part in parts.items()}
        mixture = unmix(piece.tensor, own, before)
        if mixture is None or mixture.right:
            continue
        dp_rank = dp_rank_of(evidence.plan, piece.rank)
        finding = read_weights(mixture, evidence.plan, gradient.oracle, gradient.known, dp_rank)
        yield finding or _plain_weights(mixture.weights, mixture.residual)
        return


def _plain_weights(weights: Mapping[Slot, float], residual: float) -> Finding:
    told = ", ".join(f"({r}, {m}): {weight:.4g}" for (r, m), weight in weights.items())
    says = f"a sum of microbatches (dp rank, microbatch) with other weights than 1: {told}"
    return Finding(factor="microbatches weighted", says=says, axis="dp", residual=residual)


def _messages(gradient: WrongGradient) -> Iterator[Finding]:
    """Find microbatches whose messages between stages changed places."""
    evidence = gradient.evidence
    plans = evidence.plan, evidence.reference_plan
    yield from swapped_messages(*plans, gradient.oracle, gradient.name, gradient.wrong[0])


def _other_shards(gradient: WrongGradient) -> Iterator[Finding]:
    """Find a shard that is made of other tensor ranks' shards: a wrong group, or a wrong slice."""
    plan, spec = gradient.evidence.plan, gradient.evidence.observed.specs[gradient.name]
    if spec.split_dim is None or plan.mesh.tp == 1 or spec.expert is not None:
        return
    parts = contributions(gradient.evidence.reference_plan, gradient.oracle)
    replicas = [
        sum_of([part[gradient.name] for slot, part in parts.items() if slot[0] == dp_rank])
        for dp_rank in range(plan.mesh.dp)
    ]
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


def _moved(piece: Piece, dim: int, distance: int) -> tuple[slice, ...]:
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
) -> Finding:
    used = sorted({slot for (_, slot), weight in mixed.items() if abs(weight) > EXPLAINED})
    if own not in used:
        says = f"the shard of tp {own} holds that of tp {used}: shards are permuted"
        return Finding(factor="shards permuted", says=says, axis="tp", residual=residual)
    lost = [r for r in range(dp) if abs(mixed[r, own]) <= EXPLAINED]
    says = f"the shard of tp {own} was summed with those of tp {used}: the wrong group"
    if lost:
        says += f", while the parts of dp {lost} are missing"
    return Finding(factor="wrong group", says=says, axis="tp", residual=residual)
