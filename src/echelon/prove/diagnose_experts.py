"""What a wrong gradient looks like where tokens go to experts.

An expert's gradient that was summed with that of another one; losses of routers that count too
often, or whose shares are those of some tokens only; backward passes that lose the gradient of a
gate, or that route anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

import torch

from echelon.core.plan import Plan
from echelon.prove.checks import Evidence
from echelon.prove.diagnosis import Finding
from echelon.prove.factors import (
    EXPLAINED,
    close,
    fit_basis,
    known_factors,
    name_factor,
    relative_residual,
)
from echelon.prove.microbatch_weights import sum_of
from echelon.prove.oracle import OracleStep, build_decoder, contributions
from echelon.prove.oracle_routing import routing_losses
from echelon.prove.ranks import Piece
from echelon.prove.variants_backward import backward_variants
from echelon.prove.whole_loss import loss_of_tokens, whole_loss
from echelon.prove.wrong_shares import wrong_shares

_LOSSES = {"aux": "the auxiliary loss", "z": "the z-loss"}


def gradients_of_experts(
    evidence: Evidence, oracle: OracleStep, name: str, wrong: Sequence[Piece]
) -> Iterator[Finding]:
    """Find what experts and routers are known to get wrong."""
    if evidence.plan.model.experts is None:
        return
    if evidence.observed.specs[name].expert is not None:
        yield from _other_experts(evidence, oracle, name, wrong)
    else:
        yield from _losses_weighted(evidence, oracle, name, wrong)
        yield from _shares(evidence, oracle, name, wrong)
    plan = evidence.reference_plan
    for finding, operations in backward_variants(evidence, oracle):
        model = build_decoder(plan, oracle.before, operations(), routing=oracle.routing)
        loss = whole_loss(plan, model, oracle)
        (gradient,) = torch.autograd.grad(loss, model.get_parameter(name))
        residual = _residual(wrong, gradient)
        if residual < EXPLAINED:
            yield replace(finding, residual=residual)
            return


def _residual(wrong: Sequence[Piece], gradient: torch.Tensor) -> float:
    return max(relative_residual(p.tensor.double(), gradient[p.region]) for p in wrong)


def _other_experts(
    evidence: Evidence, oracle: OracleStep, name: str, wrong: Sequence[Piece]
) -> Iterator[Finding]:
    """Find the gradients of experts that other ranks hold in the same place."""
    plan, experts = evidence.reference_plan, evidence.plan.model.experts
    number = evidence.observed.specs[name].expert
    assert experts is not None, "the model has experts"
    assert number is not None, "this is a routed expert"
    share = experts.num_experts // plan.mesh.ep
    names = {
        other: name.replace(f".experts.{number}.", f".experts.{other}.")
        for other in range(number % share, experts.num_experts, share)
    }
    parts = contributions(plan, oracle)
    replicas = range(plan.mesh.dp)
    keys = list(product(names, replicas))
    basis = [
        sum_of([part[names[other]] for slot, part in parts.items() if slot[0] == replica])
        for other, replica in keys
    ]
    for piece in wrong[:4]:
        fine, own = keys, [part[piece.region] for part in basis]
        weights, residual = fit_basis(piece.tensor, own)
        if residual >= EXPLAINED:
            fine = [(other, 0) for other in names]
            own = [oracle.gradients[other][piece.region] for other in names.values()]
            weights, residual = fit_basis(piece.tensor, own)
        used = sorted({k[0] for k, w in zip(fine, weights, strict=True) if abs(w) > EXPLAINED})
        if residual >= EXPLAINED or used in ([number], []):
            continue
        others = ", ".join(str(one) for one in used if one != number)
        if number in used:
            says = f"summed with the gradients of experts {others}: over the wrong ranks"
            yield Finding(factor="wrong group", says=says, axis="ep", residual=residual)
        else:
            says = f"the gradient of expert {others}: experts are permuted"
            yield Finding(factor="experts permuted", says=says, axis="ep", residual=residual)
        return


def _losses_weighted(
    evidence: Evidence, oracle: OracleStep, name: str, wrong: Sequence[Piece]
) -> Iterator[Finding]:
    """Find how often the losses of routers count beside that of tokens."""
    parts = _parts(evidence.reference_plan, oracle, name)
    if len(parts) == 1:
        return
    known = [one for one in known_factors(evidence.plan, oracle) if "token" not in one.name]
    for piece in wrong[:4]:
        found, residual = fit_basis(piece.tensor, [part[piece.region] for part in parts.values()])
        weights = dict(zip(parts, found, strict=True))
        odd = {kind: w for kind, w in weights.items() if not close(w, 1.0)}
        if residual >= EXPLAINED or not odd or "tokens" in odd:
            continue
        weight = next(iter(odd.values()))
        named = name_factor(weight, known, residual)
        what = " and ".join(_LOSSES[one] for one in odd)
        times = "is missing" if close(weight, 0.0) else f"counts {weight:.6g} times"
        yield replace(named, says=f"{what} {times} ({named.factor})")
        return


def _parts(plan: Plan, oracle: OracleStep, name: str) -> Mapping[str, torch.Tensor]:
    """Return the gradients that the losses of tokens and of routers give, where they give any."""
    model = build_decoder(plan, oracle.before, routing=oracle.routing)
    losses = {"tokens": loss_of_tokens(plan, model, oracle)}
    mathematics, balance = plan.mathematics, plan.mathematics.balance
    alone = {
        "aux": replace(balance, z_coefficient=0.0),
        "z": replace(balance, kind="none"),
    }
    for kind, one in alone.items():
        only = replace(plan, mathematics=replace(mathematics, balance=one))
        found = routing_losses(only, model.operations.routing, oracle.routing).gradient_B
        if found is not None:
            losses[kind] = found.sum()
    parameter = model.get_parameter(name)
    parts: dict[str, torch.Tensor] = {}
    for kind, loss in losses.items():
        (gradient,) = torch.autograd.grad(loss, parameter, retain_graph=True, allow_unused=True)
        if gradient is not None and bool(gradient.any()):
            parts[kind] = gradient
    return parts


def _shares(
    evidence: Evidence, oracle: OracleStep, name: str, wrong: Sequence[Piece]
) -> Iterator[Finding]:
    """Find an auxiliary loss that takes the shares of other tokens than it should."""
    plan = evidence.reference_plan
    if not plan.mathematics.balance.has_aux:
        return
    parts = _parts(plan, oracle, name)
    if "aux" not in parts:
        return
    others = sum_of([part for kind, part in parts.items() if kind != "aux"])
    model = build_decoder(plan, oracle.before, routing=oracle.routing)
    loss_of_tokens(plan, model, oracle)
    parameter = model.get_parameter(name)
    for finding, loss in wrong_shares(evidence, oracle, model):
        (gradient,) = torch.autograd.grad(loss, parameter, retain_graph=True)
        residual = _residual(wrong, others + gradient)
        if residual < EXPLAINED:
            yield replace(finding, residual=residual)
            return
