# SPDX-License-Identifier: Apache-2.0
"""Gradients of replicas on threads that are weighted, or left out of the sum."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from echelon.core.choices.threads import THREADS_AXIS
from echelon.core.plan import Plan
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.forward.threads import replica_of_rows
from echelon.proof.causes.gradients.microbatch_weights import WrongGradient
from echelon.proof.claims.factor_fit import EXPLAINED, fit_basis, nearly_equal
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import (
    OracleStep,
    build_decoder,
    token_losses,
)


def weighted_replicas(gradient: WrongGradient) -> Iterator[ProofFinding]:
    """Find the weights with which the gradients of replicas are summed onto the primary."""
    plan = gradient.evidence.reference_plan
    if plan.layout.threads.replicas == 1:
        return
    parts = gradients_of_replicas(plan, gradient.oracle, gradient.name)
    for piece in gradient.wrong:
        weights, residual = fit_basis(piece.tensor, [part[piece.region] for part in parts])
        if residual >= EXPLAINED or all(nearly_equal(weight, 1.0) for weight in weights):
            continue
        lost = [place for place, weight in enumerate(weights) if nearly_equal(weight, 0.0)]
        rest = [weight for place, weight in enumerate(weights) if place not in lost]
        if lost and all(nearly_equal(weight, 1.0) for weight in rest):
            says = f"the gradients of replica {', '.join(map(str, lost))} are not in the sum"
            yield ProofFinding("missing sum", says, THREADS_AXIS, residual=residual)
            return
        told = ", ".join(f"{weight:.4g}" for weight in weights)
        says = f"the gradients of replicas are averaged onto the primary with weights {told}: "
        says += "they are to be summed"
        yield ProofFinding("replicas weighted", says, THREADS_AXIS, residual=residual)
        return


def gradients_of_replicas(plan: Plan, oracle: OracleStep, name: str) -> list[torch.Tensor]:
    """Return the part of a gradient that each replica gives; all parts add up to the whole."""
    model, of_B = build_decoder(plan, oracle.before), replica_of_rows(plan)
    losses_BT = token_losses(plan, model, global_batch(plan, oracle.step), oracle.step)
    parameter = dict(model.named_parameters())[name]
    return [
        torch.autograd.grad(
            losses_BT[of_B == index].sum() / oracle.tokens, parameter, retain_graph=True
        )[0]
        for index in range(plan.layout.threads.replicas)
    ]
