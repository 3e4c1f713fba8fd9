# SPDX-License-Identifier: Apache-2.0
"""Which engine a rank of a plan with parameter servers takes."""

from __future__ import annotations

from echelon.core.plan import Plan
from echelon.training.engine import TrainEngine
from echelon.training.servers.server import AsynchronousServer
from echelon.training.servers.synchronous import ParameterServer, ServedWorker
from echelon.training.servers.worker import AsynchronousWorker


def engine_of(plan: Plan, rank: int) -> type[TrainEngine] | None:
    """Return the class of the engine of a rank; None in a run without servers."""
    updates, is_server = plan.mathematics.updates, plan.mesh.is_server(rank)
    if not plan.mesh.servers:
        return None
    if updates.is_asynchronous:
        return AsynchronousServer if is_server else AsynchronousWorker
    return ParameterServer if is_server else ServedWorker
