# SPDX-License-Identifier: Apache-2.0
"""Losses of replicas on threads that compute with old parameters.

Shape suffixes: B sequences of the global batch, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from echelon.core.choices.threads import THREADS_AXIS
from echelon.core.plan import Plan
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.claims.checks import Evidence
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
