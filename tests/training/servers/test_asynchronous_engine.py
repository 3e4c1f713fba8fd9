"""Which engine a rank of a plan takes."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.launch.local.supervisor import RankPool
from echelon.training.servers.asynchronous import AsynchronousServer, AsynchronousWorker
from echelon.training.servers.synchronous import ParameterServer, ServedWorker
from tests.parallel.servers.test_server import served_plan
from tests.training.servers.targets import engine_kind
from tests.training.servers.test_served import with_updates

_TARGET = f"{engine_kind.__module__}:{engine_kind.__name__}"


def test_ranks_of_asynchronous_servers_have_engines_of_their_own(rank_pool: RankPool) -> None:
    """S07: and synchronous ones, too."""
    plan = served_plan(2, 1)
    labels = [plan.mesh.label(rank) for rank in range(3)]
    kinds = [
        rank_pool.run(_TARGET, {"plan": one.to_json()}, 3, labels=labels)
        for one in (plan, with_updates(plan, 1))
    ]

    assert isinstance(kinds[1], Sequence)
    worker, server = ServedWorker.__name__, ParameterServer.__name__
    assert kinds[0] == [worker, worker, server]
    worker, server = AsynchronousWorker.__name__, AsynchronousServer.__name__
    assert kinds[1] == [worker, worker, server]
