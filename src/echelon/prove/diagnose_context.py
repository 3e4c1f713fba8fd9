"""What a wrong gradient looks like where a sequence is split over context ranks.

Sums over context ranks that are missing or weighted, and gradients of keys and values that did not
come home as they should.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.prove.checks import Evidence, dp_rank_of
from echelon.prove.context_parts import (
    Parts,
    Place,
    loss_parts,
    row_parts,
    tokens_of_context,
)
from echelon.prove.context_places import copies_of
from echelon.prove.diagnosis import Finding
from echelon.prove.factors import EXPLAINED, close, fit_basis
from echelon.prove.oracle import OracleStep, build_decoder
from echelon.prove.ranks import Piece
from echelon.prove.returned import Returned, wrong_returns
from echelon.prove.whole_loss import gradient_beside, whole_loss

_KEYS = ("k", "v", "k_norm")
_ATTENDED = ("q", *_KEYS, "q_norm")


def parts_of_context(
    evidence: Evidence, oracle: OracleStep, name: str, wrong: Sequence[Piece]
) -> Iterator[Finding]:
    """Find weights of context ranks that make up a wrong gradient."""
    plan, reference = evidence.plan, evidence.reference_plan
    if plan.mesh.cp == 1:
        return
    tokens = tokens_of_context(reference, oracle.step)
    beside = gradient_beside(reference, oracle, name)
    for piece in wrong[:4]:
        here = dp_rank_of(plan, piece.rank), plan.mesh.coordinates(piece.rank)[Axis.CP]
        found = _weights(piece, row_parts(reference, oracle, name))
        if found is not None:
            yield _mean_of_means(plan, *found, tokens) or _name_rows(*found, here)
            return
        found = _weights(piece, loss_parts(reference, oracle, name), beside)
        if found is not None:
            yield _mean_of_means(plan, *found, tokens) or _name_losses(*found)
            return


def gradients_of_keys(
    evidence: Evidence, oracle: OracleStep, name: str, wrong: Sequence[Piece]
) -> Iterator[Finding]:
    """Find a wrong way home of the gradients of keys and values (and of exchanged queries)."""
    plan = evidence.reference_plan
    part = _part_of_attention(name)
    if plan.mesh.cp == 1 or part not in _ATTENDED:
        return
    layer = name[: name.index(".attention.")]
    names = [
        f"{layer}.attention.{part}.weight"
        for part in _ATTENDED
        if f"{layer}.attention.{part}.weight" in oracle.gradients
    ]
    for way in wrong_returns(plan):
        model = build_decoder(plan, oracle.before, Returned(plan, way), routing=oracle.routing)
        loss = whole_loss(plan, model, oracle)
        found = torch.autograd.grad(loss, [model.get_parameter(one) for one in names])
        residual = _difference(evidence, oracle, dict(zip(names, found, strict=True)))
        if residual < EXPLAINED:
            yield replace(way.finding, residual=residual)
            return


def told_of_copies(plan: Plan, name: str, finding: Finding) -> Finding:
    """Point a factor of key/value gradients alone to the ranks that get copies of the heads."""
    copies = copies_of(plan) if plan.mesh.cp > 1 else 1
    if copies == 1 or _part_of_attention(name) not in _KEYS:
        return finding
    says = f"{finding.says}: the {copies} copies of a key/value head must be added up once"
    return replace(finding, factor=f"{finding.value:.6g}", says=says, axis="cp")


def _part_of_attention(name: str) -> str:
    return name.partition(".attention.")[2].partition(".")[0]


def _difference(evidence: Evidence, oracle: OracleStep, found: Mapping[str, torch.Tensor]) -> float:
    """Return the largest error of any piece, relative to the norm of its tensor."""
    return max(
        float((piece.tensor.double() - gradient[piece.region]).norm())
        / max(float(gradient.norm()), torch.finfo(torch.float64).tiny)
        for name, gradient in found.items()
        for piece in evidence.observed.pieces("gradients", oracle.step, name)
    )


def _weights(
    piece: Piece, parts: Parts, beside: torch.Tensor | None = None
) -> tuple[dict[Place, float], float] | None:
    basis = [part[piece.region] for part in parts.values()]
    target = piece.tensor if beside is None else piece.tensor - beside[piece.region]
    weights, residual = fit_basis(target, basis)
    if residual >= EXPLAINED or all(close(weight, 1.0) for weight in weights):
        return None
    return dict(zip(parts, weights, strict=True)), residual


def _name_rows(weights: Mapping[Place, float], residual: float, here: Place) -> Finding:
    """Name weights of what the rows of each rank gave, in a gradient that `here` holds."""
    zero = {place for place, weight in weights.items() if close(weight, 0.0)}
    kept = {place for place in weights if place not in zero}
    lost = sorted({cp for _, cp in zero})
    if kept and {cp for _, cp in kept} == {here[1]}:
        missing = {dp for dp, _ in weights} - {dp for dp, _ in kept}
        axis, over = ("dp and cp", "data and context") if missing else ("cp", "context")
        says = f"the part of cp {here[1]} alone: the sum over {over} ranks is missing"
        return Finding(factor="missing sum", says=says, axis=axis, residual=residual)
    if zero and not _lost_everywhere(weights, zero):
        says = f"the parts of cp {lost} are lost"
        return Finding(factor="missing sum", says=says, axis="cp", residual=residual)
    return Finding(
        factor="context ranks weighted",
        says=f"a sum over context ranks with weights: {_told(weights)}",
        axis="cp",
        residual=residual,
    )


def _lost_everywhere(weights: Mapping[Place, float], zero: set[Place]) -> bool:
    """Return whether every context rank lost something, of one replica or another."""
    return {cp for _, cp in zero} == {cp for _, cp in weights}


def _mean_of_means(
    plan: Plan, weights: Mapping[Place, float], residual: float, tokens: Mapping[Place, int]
) -> Finding | None:
    """Find weights that go as one over the tokens of each rank."""
    products = [weights[place] * tokens[place] for place in weights]
    if not all(close(product, products[0]) and product for product in products):
        return None
    says = "a mean of means: each context rank counts alike, whatever its tokens"
    axis = "cp" if plan.mesh.dp == 1 else "dp and cp"
    return Finding(factor="token ratio", says=says, axis=axis, residual=residual)


def _name_losses(weights: Mapping[Place, float], residual: float) -> Finding:
    """Name weights of the losses of each rank's positions."""
    zero = {place for place, weight in weights.items() if close(weight, 0.0)}
    if zero and not _lost_everywhere(weights, zero):
        says = f"the losses of the positions of cp {sorted({cp for _, cp in zero})} are left out"
        return Finding(factor="zero", says=says, axis="cp", residual=residual)
    return Finding(
        factor="context ranks weighted",
        says=f"the losses of context ranks have weights: {_told(weights)}",
        axis="cp",
        residual=residual,
    )


def _told(weights: Mapping[Place, float]) -> str:
    several = len({dp for dp, _ in weights}) > 1
    return ", ".join(
        f"{f'dp {dp} ' if several else ''}cp {cp} x {weight:.4g}"
        for (dp, cp), weight in weights.items()
    )
