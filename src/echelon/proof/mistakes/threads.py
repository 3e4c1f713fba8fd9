# SPDX-License-Identifier: Apache-2.0
"""What replicas on threads get wrong: old parameters on some, gradients weighted or left out.

Shape suffixes: B sequences of the global batch, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from echelon.core.choices.threads import THREADS_AXIS
from echelon.core.plan import Plan
from echelon.proof.claims.checks import Evidence
from echelon.proof.claims.wrong_factors import EXPLAINED, fit_basis, nearly_equal
from echelon.proof.diagnose.diagnosis import ProofFinding
from echelon.proof.diagnose.microbatch_weights import WrongGradient
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import (
    MicrobatchKey,
    OracleStep,
    build_decoder,
    sums_by_microbatch,
    token_losses,
)

_SAME = 1e-7  # relative difference


def replica_of_rows(plan: Plan) -> torch.Tensor:
    """Return which replica has each sequence of the global batch, int64 [B]."""
    size, replicas = plan.layout.microbatch_sequences, plan.layout.threads.replicas
    rows_B = torch.arange(plan.mathematics.global_sequences)
    return rows_B % size // (size // replicas)


def outdated_replica(
    evidence: Evidence, oracle: OracleStep, observed: Mapping[MicrobatchKey, float]
) -> ProofFinding | None:
    """Find replicas whose losses are those of the parameters before the last update."""
    plan = evidence.reference_plan
    replicas = plan.layout.threads.replicas
    if replicas == 1 or not oracle.step or evidence.oracle[oracle.step - 1].skipped:
        return None
    batch, of_B = global_batch(plan, oracle.step), replica_of_rows(plan)
    with torch.no_grad():
        new_BT, old_BT = (
            token_losses(plan, build_decoder(plan, values), batch, oracle.step)
            for values in (oracle.before, evidence.oracle[oracle.step - 1].before)
        )
    others = [*range(1, replicas)]
    for stale in (*([one] for one in others), others):
        rows_B = torch.isin(of_B, torch.tensor(stale))
        losses_BT = torch.where(rows_B[:, None], old_BT, new_BT)
        sums = sums_by_microbatch(plan, batch, losses_BT)
        found = {slot: float(sums[slot][0]) for slot in observed}
        if all(abs(found[slot] - value) <= _SAME * abs(value) for slot, value in observed.items()):
            told = " and ".join(f"replica {one}" for one in stale)
            says = f"{told} computed with the parameters of before the last update: not refreshed"
            return ProofFinding("stale", says, THREADS_AXIS, tensor=next(iter(oracle.before)))
    return None


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
