"""Clocks, versions and the bound of an asynchronous server."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread

import pytest

from echelon.core.choices.updates import Updates
from echelon.core.errors import RunFailed
from echelon.core.plan import Plan
from echelon.core.rulebook.run import LOSS_NOT_FINITE
from echelon.training.servers.served import Answer, Push, Served


def with_updates(plan: Plan, bound: int, damping: float = 0.0) -> Plan:
    """Return a plan whose servers are asynchronous, with a bound."""
    updates = Updates(kind="asynchronous", max_staleness=bound, damping=damping)
    return replace(plan, mathematics=replace(plan.mathematics, updates=updates))


def served(bound: int, num_workers: int = 2) -> Served:
    """Return a server that notes its updates and has nothing to send."""
    return Served(
        updates=Updates(kind="asynchronous", max_staleness=bound),
        clocks=[0] * num_workers,
        update=lambda pushes, staleness: None,
        snapshot=list,
        decides=True,
    )


def push(worker: int, step: int, version: int, stop_after: int = 0) -> Push:
    """Return a push without elements."""
    return Push(
        worker=worker,
        step=step,
        version=version,
        tokens=1,
        gradients=(),
        loss=0.5,
        norm_squared=1.0,
        stop_after=stop_after,
    )


def test_staleness_counts_the_updates_between() -> None:
    """S07, A14: version applied less version read, by hand."""
    server = served(bound=3)
    answers = [
        server.take(push(0, 0, 0)),
        server.take(push(0, 1, 1)),
        server.take(push(1, 0, 0)),
    ]

    assert [one.version for one in answers] == [1, 2, 3]
    assert [(one.worker, one.staleness) for one in server.applied] == [(0, 0), (0, 0), (1, 2)]


def test_a_worker_that_is_too_far_ahead_waits() -> None:
    """S07: with a bound of 1 the third step of one waits for the first of the other."""
    server, found = served(bound=1), list[Answer]()
    server.take(push(0, 0, 0))

    def third() -> None:
        found.append(server.take(push(0, 1, 1)))

    thread = Thread(target=third)
    thread.start()
    thread.join(timeout=0.3)
    assert thread.is_alive()
    assert not found
    server.take(push(1, 0, 0))
    thread.join(timeout=10)
    assert [one.version for one in found] == [3]


def test_a_stop_is_heard_of_before_the_step_that_it_names() -> None:
    """S07: no worker has ended more than m steps, and the run stops after m + 2."""
    server = served(bound=3)
    server.take(push(0, 0, 0))
    server.take(push(0, 1, 1))
    answer = server.take(push(1, 0, 0, stop_after=-1))
    assert answer.stop_after == 4
    assert server.take(push(0, 2, 2)).stop_after == 4


def test_what_a_thread_has_met_ends_every_wait() -> None:
    """S07: a lost worker is told by the rank that waits."""
    server = served(bound=0)
    server.fail(ConnectionError("worker 1"))
    with pytest.raises(RuntimeError, match="a worker of this server is lost"):
        server.wait_for(1)


def test_an_error_of_ours_is_told_as_it_is() -> None:
    """S07: a norm that is not finite names its worker, and is no lost worker."""
    server = served(bound=1)
    server.fail(RunFailed(LOSS_NOT_FINITE.problem("the gradient of worker 1 has norm nan")))
    with pytest.raises(RunFailed, match="worker 1 has norm nan"):
        server.take(push(0, 0, 0))
