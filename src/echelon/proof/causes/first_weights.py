# SPDX-License-Identifier: Apache-2.0
"""What wrong first weights are: another slice, another expert, another order, another seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from echelon.layout.stage import pieces_of
from echelon.proof.causes.factors import named_factor
from echelon.proof.causes.finding import ProofFinding, with_distinguishing_axis
from echelon.proof.claims.checks import Check
from echelon.proof.claims.plan_evidence import JudgedEvidence, PlanEvidence
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.fits import fit_factor, relative_residual
from echelon.proof.evidence.run import INITIAL, HeldPart
from echelon.proof.ranks import ObservedShard


def explain_first_weights(evidence: JudgedEvidence, failure: Check) -> ProofFinding:
    """Explain wrong first weights: right values at a wrong place, or other values."""
    name, run = failure.subject, evidence.run
    right = evidence.initial[name]
    kind = run.value_kinds[-1 if failure.detail else 0]
    parts = [part for part in run.parts(kind, INITIAL, name) if run.fits(part)]
    wrong = [part for part in parts if not _holds(part, right)]
    if not wrong:
        return ProofFinding("missing", "no rank holds it")
    finding = next(_findings(evidence, wrong[0], right), None)
    if finding is None:
        says = "other random numbers than one device has"
        if isinstance(evidence, CapturedEvidence):
            says += ": build and seed it alike on every rank, or set OnRank.copy_initial"
        finding = ProofFinding("none", says)
    ranks = tuple(dict.fromkeys(part.rank for part in wrong))
    holders = [part.rank for part in parts]
    told = with_distinguishing_axis(evidence.axes(name), finding, ranks, holders)
    return replace(told, ranks=ranks)


def _holds(part: HeldPart, right: torch.Tensor) -> bool:
    return torch.equal(part.tensor, part.of(right).to(part.tensor.dtype))


def _findings(
    evidence: JudgedEvidence, part: HeldPart, right: torch.Tensor
) -> Iterator[ProofFinding]:
    if isinstance(evidence, PlanEvidence) and isinstance(part, ObservedShard):
        yield from _moved_from(evidence, part, right)
    seen, own = part.tensor.double(), part.of(right).double()
    for other in evidence.run.parts(part.kind, INITIAL, part.name):
        theirs = other.of(right).double()
        if other.rank != part.rank and theirs.shape == seen.shape and torch.equal(theirs, seen):
            says = f"rank {part.rank} holds what rank {other.rank} must: slices are permuted"
            yield ProofFinding("shards permuted", says)
    factor, residual = fit_factor(seen, own)
    if residual < evidence.explained:
        yield named_factor(evidence, evidence.steps[0], factor, residual)
    if isinstance(evidence, PlanEvidence) and isinstance(part, ObservedShard):
        yield from _another_expert(evidence, part)
    if relative_residual(_in_order(seen), _in_order(own)) < evidence.explained:
        yield ProofFinding("permuted", "holds the right values in another order")


def _in_order(values: torch.Tensor) -> torch.Tensor:
    return values.flatten().sort().values


def _another_expert(evidence: PlanEvidence, piece: ObservedShard) -> Iterator[ProofFinding]:
    """Find another expert whose first weights a piece holds."""
    expert = evidence.run.specs[piece.name].expert
    if expert is None:
        return
    prefix, _, suffix = piece.name.partition(f".{expert}.")
    for name, values in evidence.initial.items():
        namesake = name.startswith(f"{prefix}.") and name.endswith(f".{suffix}")
        if namesake and _holds(piece, values):
            says = f"holds the first weights of {name.removesuffix(f'.{suffix}')}: "
            yield ProofFinding("experts permuted", says + "experts are numbered otherwise", "ep")


def _moved_from(
    evidence: PlanEvidence, piece: ObservedShard, right: torch.Tensor
) -> Iterator[ProofFinding]:
    """Find where along the tensor-parallel dim the values of a piece stand in the right tensor."""
    spec = evidence.run.specs[piece.name]
    dim = spec.split_dim
    if dim is None or pieces_of(evidence.plan, spec) == 1:
        return
    for start in range(spec.shape[dim] - piece.tensor.shape[dim] + 1):
        offset = (*piece.offset[:dim], start, *piece.offset[dim + 1 :])
        if _holds(replace(piece, offset=offset), right):
            says = f"holds dim {dim} from {start} on instead of from {piece.offset[dim]}"
            yield ProofFinding("shards permuted", f"{says}: a wrong slice", "tp")
