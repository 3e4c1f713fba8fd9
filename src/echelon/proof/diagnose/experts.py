# SPDX-License-Identifier: Apache-2.0
"""What a wrong gradient looks like where tokens go to experts.

An expert's gradient that was summed with that of another one; losses of routers that count too
often, or whose shares are those of some tokens only; backward passes that lose the gradient of a
gate, or that route anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

import torch

from echelon.core.plan import Plan
from echelon.proof.claims.wrong_factors import EXPLAINED, fit_basis, name_factor, nearly_equal
from echelon.proof.diagnose.diagnosis import ProofFinding
from echelon.proof.diagnose.microbatch_weights import WrongGradient, replica_gradients, sum_of
from echelon.proof.mistakes.expert_gradients import backward_variants, wrong_shares
from echelon.proof.oracle.losses import loss_of_tokens, whole_loss
from echelon.proof.oracle.oracle import OracleStep, build_decoder
from echelon.proof.oracle.routing import routing_losses

_LOSSES = {"aux": "the auxiliary loss", "z": "the z-loss"}


def gradients_of_experts(gradient: WrongGradient) -> Iterator[ProofFinding]:
    """Find what experts and routers are known to get wrong."""
    evidence, oracle, plan = gradient.evidence, gradient.oracle, gradient.evidence.reference_plan
    if plan.model.experts is None:
        return
    if gradient.spec.expert is not None:
        yield from _other_experts(gradient)
    else:
        yield from _losses_weighted(gradient)
        yield from _shares(gradient)
    for variant in backward_variants(evidence, oracle):
        model = variant.build(plan, oracle)
        parameter = model.get_parameter(gradient.name)
        (found,) = torch.autograd.grad(whole_loss(plan, model, oracle), parameter)
        residual = gradient.residual(found)
        if residual < EXPLAINED:
            yield replace(variant.finding, residual=residual)
            return


def _other_experts(gradient: WrongGradient) -> Iterator[ProofFinding]:
    """Find the gradients of experts that other ranks hold in the same place."""
    plan, oracle, name = gradient.evidence.reference_plan, gradient.oracle, gradient.name
    experts, number = plan.model.experts, gradient.spec.expert
    assert experts is not None, "the model has experts"
    assert number is not None, "this is a routed expert"
    share = experts.num_experts // plan.mesh.ep
    names = {
        other: name.replace(f".experts.{number}.", f".experts.{other}.")
        for other in range(number % share, experts.num_experts, share)
    }
    keys = list(product(names, range(plan.mesh.dp)))
    basis = replica_gradients(gradient, *names.values())
    for piece in gradient.wrong[:4]:
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
            yield ProofFinding("wrong group", says, "ep", residual=residual)
        else:
            says = f"the gradient of expert {others}: experts are permuted"
            yield ProofFinding("experts permuted", says, "ep", residual=residual)
        return


def _losses_weighted(gradient: WrongGradient) -> Iterator[ProofFinding]:
    """Find how often the losses of routers count beside that of tokens."""
    parts = _parts(gradient.evidence.reference_plan, gradient.oracle, gradient.name)
    if len(parts) == 1:
        return
    known = [one for one in gradient.known if "token" not in one.name]
    for piece in gradient.wrong[:4]:
        found, residual = fit_basis(piece.tensor, [part[piece.region] for part in parts.values()])
        weights = dict(zip(parts, found, strict=True))
        odd = {kind: w for kind, w in weights.items() if not nearly_equal(w, 1.0)}
        if residual >= EXPLAINED or not odd or "tokens" in odd:
            continue
        weight = next(iter(odd.values()))
        named = name_factor(weight, known, residual)
        what = " and ".join(_LOSSES[one] for one in odd)
        times = "is missing" if nearly_equal(weight, 0.0) else f"counts {weight:.6g} times"
        yield replace(named, description=f"{what} {times} ({named.factor})")
        return


def _parts(plan: Plan, oracle: OracleStep, name: str) -> Mapping[str, torch.Tensor]:
    """Return the gradients that the losses of tokens and of routers give, where they give any."""
    model = build_decoder(plan, oracle.before, routing=oracle.routing, rounding=oracle.rounding)
    losses = {"tokens": loss_of_tokens(plan, model, oracle)}
    mathematics, balance = plan.mathematics, plan.mathematics.balance
    alone = {"aux": replace(balance, z_coefficient=0.0), "z": replace(balance, kind="none")}
    for kind, one in alone.items():
        only = replace(plan, mathematics=replace(mathematics, balance=one))
        found, _ = routing_losses(only, model.operations.routing, oracle.routing)
        if found is not None:
            losses[kind] = found.sum()
    parameter = model.get_parameter(name)
    parts: dict[str, torch.Tensor] = {}
    for kind, loss in losses.items():
        (gradient,) = torch.autograd.grad(loss, parameter, retain_graph=True, allow_unused=True)
        if gradient is not None and bool(gradient.any()):
            parts[kind] = gradient
    return parts


def _shares(gradient: WrongGradient) -> Iterator[ProofFinding]:
    """Find an auxiliary loss that takes the shares of other tokens than it should."""
    evidence, oracle, plan = gradient.evidence, gradient.oracle, gradient.evidence.reference_plan
    if not plan.mathematics.balance.has_aux:
        return
    parts = _parts(plan, oracle, gradient.name)
    if "aux" not in parts:
        return
    others = sum_of([part for kind, part in parts.items() if kind != "aux"])
    model = build_decoder(plan, oracle.before, routing=oracle.routing, rounding=oracle.rounding)
    loss_of_tokens(plan, model, oracle)
    parameter = model.get_parameter(gradient.name)
    for finding, loss in wrong_shares(evidence, oracle, model):
        (found,) = torch.autograd.grad(loss, parameter, retain_graph=True)
        residual = gradient.residual(others + found)
        if residual < EXPLAINED:
            yield replace(finding, residual=residual)
            return
