# SPDX-License-Identifier: Apache-2.0
"""Whether a plan fits: what every command says of it, and the exit code of `echelon plan`."""

from __future__ import annotations

from echelon.core.plan import Plan
from echelon.core.units import gib
from echelon.cost.bytes.held import bytes_held
from echelon.planner.lint.checks import lint
from echelon.planner.lint.memory import DOES_NOT_FIT
from echelon.planner.predict.stage_rows import most_held_bytes, stage_rows


def plan_fits(plan: Plan) -> bool:
    """Return whether every rank's device has room for what it holds, activations included."""
    return not why_not_fit(plan)


def why_not_fit(plan: Plan) -> str:
    """Return the arithmetic of a plan that does not fit, and a remedy; "" if it fits."""
    memory = plan.cluster.device.memory_bytes
    for finding in lint(plan):
        if finding.id == DOES_NOT_FIT:
            return f"{finding.id}: {finding.message} -> {finding.do}"
    held = max(most_held_bytes(plan, stage_rows(plan)), most_held_by_server(plan))
    if held <= memory:
        return ""
    return (
        f"{DOES_NOT_FIT}: {gib(held)} GiB between steps on the fullest rank, its device has "
        f"{gib(memory)} -> a higher ZeRO stage, more ranks, or offload"
    )


def most_held_by_server(plan: Plan) -> int:
    """Return what the server that holds most holds between steps; 0 where there is none."""
    ranks = plan.mesh.server_ranks
    return max((sum(term.bytes for term in bytes_held(plan, rank)) for rank in ranks), default=0)
