"""Whether a plan fits: what every command says of it, and the exit code of `echelon plan`."""

from __future__ import annotations

from echelon.core.plan import Plan
from echelon.cost.bytes.held import bytes_held
from echelon.planner.lint.checks import lint
from echelon.planner.lint.memory import DOES_NOT_FIT
from echelon.planner.predict.stage_rows import most_held_bytes, stage_rows


def plan_fits(plan: Plan) -> bool:
    """Return whether every rank's device has room for what it holds, activations included."""
    held = max(most_held_bytes(plan, stage_rows(plan)), most_held_by_server(plan))
    too_full = any(finding.id == DOES_NOT_FIT for finding in lint(plan))
    return held <= plan.cluster.device.memory_bytes and not too_full


def most_held_by_server(plan: Plan) -> int:
    """Return what the server that holds most holds between steps; 0 where there is none."""
    ranks = plan.mesh.server_ranks
    return max((sum(term.bytes for term in bytes_held(plan, rank)) for rank in ranks), default=0)
