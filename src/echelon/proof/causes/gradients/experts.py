# SPDX-License-Identifier: Apache-2.0
"""What a wrong gradient looks like where tokens go to experts.

An expert's gradient that was summed with that of another one; losses of routers that count too
often, or whose shares are those of some tokens only; backward passes that lose the gradient of a
gate, or that route anew.

Shape suffixes: N tokens of the global batch (sequence first), S scopes, E experts, D hidden, K
experts of a token, F inner width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations, product
from typing import cast

import torch

from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch
from echelon.models.decoder import Decoder
from echelon.models.moe import (
    Expert,
    MixtureOfExperts,
    RoutingNotes,
    probabilities,
    route_reference,
)
from echelon.models.operations import Operations
from echelon.proof.causes.factors import name_factor
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.forward.experts import assignment_outputs, summed
from echelon.proof.causes.forward.variants import Variant
from echelon.proof.causes.gradients.microbatch_weights import (
    WrongGradientOfPlan,
    replica_gradients,
    sum_of,
)
from echelon.proof.causes.token_ranks import token_rows
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.evidence.fits import EXPLAINED, fit_basis, nearly_equal
from echelon.proof.oracle.oracle import OracleStep, build_decoder, loss_of_tokens, whole_loss
from echelon.proof.oracle.routing import routing_losses

_LOSSES = {"aux": "the auxiliary loss", "z": "the z-loss"}


def gradients_of_experts(gradient: WrongGradientOfPlan) -> Iterator[ProofFinding]:
    """Find what experts and routers are known to get wrong."""
    evidence, oracle, plan = gradient.evidence, gradient.step, gradient.evidence.reference_plan
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


def _other_experts(gradient: WrongGradientOfPlan) -> Iterator[ProofFinding]:
    """Find the gradients of experts that other ranks hold in the same place."""
    plan, oracle, name = gradient.evidence.reference_plan, gradient.step, gradient.name
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


def _losses_weighted(gradient: WrongGradientOfPlan) -> Iterator[ProofFinding]:
    """Find how often the losses of routers count beside that of tokens."""
    parts = _parts(gradient.evidence.reference_plan, gradient.step, gradient.name)
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


def _shares(gradient: WrongGradientOfPlan) -> Iterator[ProofFinding]:
    """Find an auxiliary loss that takes the shares of other tokens than it should."""
    evidence, oracle, plan = gradient.evidence, gradient.step, gradient.evidence.reference_plan
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


SCOPE_AXES = {"data": "dp", "context": "cp", "tensor": "tp", "microbatch": "microbatches"}
"""The axis of each word for who shares tokens."""


def wrong_shares(
    evidence: PlanEvidence, oracle: OracleStep, model: Decoder
) -> Iterator[tuple[ProofFinding, torch.Tensor]]:
    """Yield wrong auxiliary losses of a model that has run, the narrowest scopes first.

    The loads of a global scope are of the step before.
    """
    plan, rows = evidence.reference_plan, token_rows(evidence.reference_plan)
    scope = plan.mathematics.balance.aux_over
    now = {layer: one.chosen_NK for layer, one in model.operations.routing.routed.items()}
    if scope == "global":
        if oracle.step:
            before = evidence.steps[oracle.step - 1].routed
            last = {layer: flat(one.picked_BTK) for layer, one in before.items()}
            for names in _scopes(plan, *SCOPE_AXES):
                yield _finding(names), aux_loss(plan, model, last, rows.scope(*names))
        says = "the auxiliary loss takes the shares of this step, not of the one before"
        yield (
            ProofFinding("shares of this step", says),
            aux_loss(plan, model, now, torch.zeros_like(rows.row_N)),
        )
        return
    whole = ("sequence",) if scope == "sequence" else ("data", "microbatch")
    for names in _scopes(plan, "context", "tensor"):
        yield _finding(names), aux_loss(plan, model, now, rows.scope(*whole, *names))


def flat(chosen_BTK: torch.Tensor) -> torch.Tensor:
    """Return what is given by sequence in the order of tokens, [N, K]."""
    return chosen_BTK.transpose(0, 1).flatten(0, 1)


def loads_in(chosen_NK: torch.Tensor, scope_N: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return how many tokens of each scope chose each expert, [S, E]."""
    places = scope_N[:, None] * num_experts + chosen_NK
    size = (int(scope_N.max()) + 1) * num_experts
    return torch.bincount(places.reshape(-1), minlength=size).view(-1, num_experts)


def aux_loss(
    plan: Plan, model: Decoder, chosen: dict[int, torch.Tensor], scope_N: torch.Tensor
) -> torch.Tensor:
    """Return the auxiliary loss of all layers where each token takes the shares of its scope."""
    experts, balance = plan.model.experts, plan.mathematics.balance
    assert experts is not None, "only a model with experts has routers"
    factor = balance.aux_coefficient * experts.num_experts / plan.tokens_per_step
    losses: list[torch.Tensor] = []
    for layer, routed in model.operations.routing.routed.items():
        counts_SE = loads_in(chosen[layer], scope_N, experts.num_experts).double()
        shares_SE = counts_SE / counts_SE.sum(-1, keepdim=True)
        p_NE = probabilities(routed.scores_NE, experts)
        losses.append(factor * (p_NE * shares_SE[scope_N].to(p_NE.dtype)).sum())
    return torch.stack(losses).sum()


def several_of(plan: Plan, names: Iterable[str]) -> list[str]:
    """Return those of `names` (of `SCOPE_AXES`) that tokens can be taken apart by."""
    mesh = plan.mesh
    degrees = {"data": mesh.dp, "context": mesh.cp, "tensor": mesh.tp}
    return [name for name in names if degrees.get(name, plan.num_microbatches) > 1]


def _scopes(plan: Plan, *names: str) -> Iterator[tuple[str, ...]]:
    """Yield the ways to take apart tokens that some ranks, or microbatches, do not share."""
    several = several_of(plan, names)
    for count in range(len(several), 0, -1):
        yield from combinations(several, count)


def _finding(names: tuple[str, ...]) -> ProofFinding:
    axis = " and ".join(SCOPE_AXES[name] for name in names)
    says = f"the auxiliary loss takes the shares of the tokens of each {axis} by itself"
    return ProofFinding("local shares", says, axis)


Biases = Mapping[int, torch.Tensor]


class UnsummedGateGradients(Operations):
    """Give each gate the gradient of the piece of its expert on the rank that routes its token."""

    def __init__(self, plan: Plan) -> None:
        """Take pieces and ranks from `plan`."""
        self.expert_tp = plan.layout.experts.expert_tp
        self.tensor_N = token_rows(plan).tensor_N

    def mixture(
        self, x_ND: torch.Tensor, mixture: MixtureOfExperts, batch: TokenBatch
    ) -> torch.Tensor:
        """Return what the experts make, piece by piece."""
        routed = route_reference(x_ND, mixture, batch, self.routing)
        self.routing.routed[mixture.layer] = routed
        y_ND = torch.zeros_like(x_ND)
        for name, module in mixture.experts.items():
            expert = cast(Expert, module)
            here_NK = (routed.chosen_NK == int(name)) & routed.kept_NK
            token, place = torch.nonzero(here_NK).unbind(-1)
            gates, x = routed.gates_NK[token, place], x_ND[token]
            inner = expert.inner(x).chunk(self.expert_tp, dim=-1)
            down = expert.down.weight.chunk(self.expert_tp, dim=-1)
            for piece in range(self.expert_tp):
                own = self.tensor_N[token] == piece
                weights = torch.where(own, gates, gates.detach())
                made = inner[piece] * weights[:, None] @ down[piece].t()
                if mixture.routing.bias and piece == 0:
                    made = made + expert.weighted_bias(weights, x.dtype)
                y_ND = y_ND.index_add(0, token, made)
        return y_ND + mixture.shared(x_ND) if hasattr(mixture, "shared") else y_ND


class ReroutedRecompute(Operations):
    """Go forward by the right biases, and backward through what other ones would give."""

    def __init__(self, plan: Plan, biases: Biases) -> None:
        """Route by `biases` in backward, in the layers that are recomputed."""
        self.recompute, self.biases = plan.layout.recompute, biases

    def mixture(
        self, x_ND: torch.Tensor, mixture: MixtureOfExperts, batch: TokenBatch
    ) -> torch.Tensor:
        """Return the right output, with the gradient of another."""
        if not self.recompute.recomputes(mixture.layer):
            return super().mixture(x_ND, mixture, batch)
        with torch.no_grad():
            right_ND = super().mixture(x_ND, mixture, batch)
        right = self.routing.routed[mixture.layer]
        other = RoutingNotes(balance=self.routing.balance, biases=self.biases)
        anew = route_reference(x_ND, mixture, batch, other)
        # The losses of routers are made anew, too: their counts are of before.
        self.routing.routed[mixture.layer] = replace(anew, chosen_NK=right.chosen_NK)
        y_ND = summed(assignment_outputs(x_ND, mixture, anew), x_ND, mixture)
        return y_ND + (right_ND - y_ND).detach()


def backward_variants(evidence: PlanEvidence, oracle: OracleStep) -> Iterator[Variant]:
    """Yield the mistakes that are made in backward alone."""
    plan = evidence.reference_plan
    if plan.layout.experts.expert_tp > 1:
        says = "gates have the gradient of one piece of an expert: not summed over its pieces"
        yield Variant(ProofFinding("missing sum", says, "tp"), UnsummedGateGradients(plan))
    if plan.layout.recompute.policy != "none" and oracle.routing.biases:
        biases: dict[str, Biases] = {
            "no biases": {i: torch.zeros_like(b) for i, b in oracle.routing.biases.items()},
            "the biases of the next step": oracle.routing_after.biases,
        }
        if oracle.step:
            last = evidence.steps[oracle.step - 1].routing.biases
            biases["the biases of the step before"] = last
        for which, other in biases.items():
            says = f"what is recomputed is routed anew, by {which}"
            yield Variant(ProofFinding("routed anew", says), ReroutedRecompute(plan, other))
