# SPDX-License-Identifier: Apache-2.0
"""Which engine a rank of a plan takes."""

from __future__ import annotations

from typing import Any

from echelon.core.plan import Plan
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine
from echelon.training.local_sgd.elastic_engine import ElasticIsland
from echelon.training.servers.server import AsynchronousServer
from echelon.training.servers.worker import AsynchronousWorker


def make_engine(plan: Plan, recorder: Recorder, *args: Any, **named: Any) -> TrainEngine:
    """Return the engine of the recorder's rank; the arguments are those of `TrainEngine`."""
    kind, updates = TrainEngine, plan.mathematics.updates
    server = plan.mesh.is_server(recorder.rank)
    if plan.mathematics.local_sgd.is_elastic:
        kind = ElasticIsland
    elif updates.is_asynchronous:
        kind = AsynchronousServer if server else AsynchronousWorker
    return kind(plan, recorder, *args, **named)
