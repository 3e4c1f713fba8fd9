# SPDX-License-Identifier: Apache-2.0
"""What a wrong gradient looks like where a sequence is split over context ranks.

Sums over context ranks that are missing or weighted, and gradients of keys and values that did not
come home as they should.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.proof.claims.wrong_factors import EXPLAINED, fit_basis, nearly_equal
from echelon.proof.diagnose.context_parts import (
    DataContextRank,
    GradientParts,
    loss_gradients_by_rank,
    row_gradients_by_rank,
    tokens_by_context_rank,
)
from echelon.proof.diagnose.diagnosis import ProofFinding
from echelon.proof.diagnose.microbatch_weights import WrongGradient
from echelon.proof.diagnose.token_ranks import copies_of
from echelon.proof.mistakes.gradient_misrouting import gradient_misroutings, misrouted_attention
from echelon.proof.oracle.losses import router_loss_gradient, whole_loss
from echelon.proof.oracle.oracle import build_decoder
from echelon.proof.ranks import ObservedShard

_KEYS = ("k", "v", "k_norm")
_ATTENDED = ("q", *_KEYS, "q_norm")


def context_rank_weights(gradient: WrongGradient) -> Iterator[ProofFinding]:
    """Find weights of context ranks that make up a wrong gradient."""
    plan, reference = gradient.evidence.plan, gradient.evidence.reference_plan
    oracle, name = gradient.oracle, gradient.name
    if plan.mesh.cp == 1:
        return
    tokens = tokens_by_context_rank(reference, oracle.step)
    beside = router_loss_gradient(reference, oracle, name)
    for piece in gradient.wrong[:4]:
        here = plan.mesh.coordinates(piece.rank)[Axis.CP]
        found = _weights(piece, row_gradients_by_rank(reference, oracle, name))
        if found is not None:
            yield _mean_of_means(plan, *found, tokens) or _name_rows(*found, here)
            return
        found = _weights(piece, loss_gradients_by_rank(reference, oracle, name), beside)
        if found is not None:
            yield _mean_of_means(plan, *found, tokens) or _name_losses(*found)
            return


def gradients_of_keys(gradient: WrongGradient) -> Iterator[ProofFinding]:
    """Find a wrong way home of the gradients of keys and values (and of exchanged queries)."""
    plan, oracle, name = gradient.evidence.reference_plan, gradient.oracle, gradient.name
    if plan.mesh.cp == 1 or _part_of_attention(name) not in _ATTENDED:
        return
    layer = name[: name.index(".attention.")]
    every = [f"{layer}.attention.{part}.weight" for part in _ATTENDED]
    names = [one for one in every if one in oracle.gradients]
    for way in gradient_misroutings(plan):
        operations = misrouted_attention(plan, way)
        model = build_decoder(
            plan, oracle.before, operations, routing=oracle.routing, rounding=oracle.rounding
        )
        parameters = [model.get_parameter(one) for one in names]
        found = torch.autograd.grad(whole_loss(plan, model, oracle), parameters)
        residual = _difference(gradient, dict(zip(names, found, strict=True)))
        if residual < EXPLAINED:
            yield replace(way.finding, residual=residual)
            return


def attribute_to_head_copies(plan: Plan, name: str, finding: ProofFinding) -> ProofFinding:
    """Point a factor of key/value gradients alone to the ranks that get copies of the heads."""
    copies = copies_of(plan) if plan.mesh.cp > 1 else 1
    if copies == 1 or _part_of_attention(name) not in _KEYS:
        return finding
    says = f"{finding.description}: the {copies} copies of a key/value head must be added up once"
    return replace(finding, factor=f"{finding.value:.6g}", description=says, axis="cp")


def _part_of_attention(name: str) -> str:
    return name.partition(".attention.")[2].partition(".")[0]


def _difference(gradient: WrongGradient, found: Mapping[str, torch.Tensor]) -> float:
    """Return the largest error of any piece, relative to the norm of its tensor."""
    observed, step = gradient.evidence.observed, gradient.oracle.step
    return max(
        float((piece.tensor.double() - whole[piece.region]).norm())
        / max(float(whole.norm()), torch.finfo(torch.float64).tiny)
        for name, whole in found.items()
        for piece in observed.shards("gradients", step, name)
    )


def _weights(
    piece: ObservedShard, parts: GradientParts, beside: torch.Tensor | None = None
) -> tuple[dict[DataContextRank, float], float] | None:
    basis = [part[piece.region] for part in parts.values()]
    target = piece.tensor if beside is None else piece.tensor - beside[piece.region]
    weights, residual = fit_basis(target, basis)
    if residual >= EXPLAINED or all(nearly_equal(weight, 1.0) for weight in weights):
        return None
    return dict(zip(parts, weights, strict=True)), residual


def _name_rows(
    weights: Mapping[DataContextRank, float], residual: float, here: int
) -> ProofFinding:
    """Name weights of what the rows of each rank gave, in a gradient of context rank `here`."""
    zero = _lost(weights)
    kept = weights.keys() - zero
    if kept and {cp for _, cp in kept} == {here}:
        missing = {dp for dp, _ in weights} - {dp for dp, _ in kept}
        axis, over = ("dp and cp", "data and context") if missing else ("cp", "context")
        says = f"the part of cp {here} alone: the sum over {over} ranks is missing"
        return ProofFinding("missing sum", says, axis, residual=residual)
    lost = _lost_context_ranks(weights)
    if lost:
        return ProofFinding(
            "missing sum", f"the parts of cp {lost} are lost", "cp", residual=residual
        )
    says = f"a sum over context ranks with weights: {_describe_weights(weights)}"
    return ProofFinding("context ranks weighted", says, "cp", residual=residual)


def _lost(weights: Mapping[DataContextRank, float]) -> set[DataContextRank]:
    return {place for place, weight in weights.items() if nearly_equal(weight, 0.0)}


def _lost_context_ranks(weights: Mapping[DataContextRank, float]) -> list[int]:
    """Return the context ranks that lost something; none where all did, on one replica or more."""
    lost = {cp for _, cp in _lost(weights)}
    return [] if lost == {cp for _, cp in weights} else sorted(lost)


def _mean_of_means(
    plan: Plan,
    weights: Mapping[DataContextRank, float],
    residual: float,
    tokens: Mapping[DataContextRank, int],
) -> ProofFinding | None:
    """Find weights that go as one over the tokens of each rank."""
    products = [weights[place] * tokens[place] for place in weights]
    if not all(nearly_equal(product, products[0]) and product for product in products):
        return None
    says = "a mean of means: each context rank counts alike, whatever its tokens"
    axis = "cp" if plan.mesh.dp == 1 else "dp and cp"
    return ProofFinding("token ratio", says, axis, residual=residual)


def _name_losses(weights: Mapping[DataContextRank, float], residual: float) -> ProofFinding:
    """Name weights of the losses of each rank's positions."""
    lost = _lost_context_ranks(weights)
    factor = "zero" if lost else "context ranks weighted"
    says = f"the losses of context ranks have weights: {_describe_weights(weights)}"
    if lost:
        says = f"the losses of the positions of cp {lost} are left out"
    return ProofFinding(factor, says, "cp", residual=residual)


def _describe_weights(weights: Mapping[DataContextRank, float]) -> str:
    several = len({dp for dp, _ in weights}) > 1
    return ", ".join(
        f"{f'dp {dp} ' if several else ''}cp {cp} x {weight:.4g}"
        for (dp, cp), weight in weights.items()
    )
