"""Who is counted, where all meet, and what is told of losses, on one server without messages."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest

from echelon.core.choices.updates import Updates
from echelon.core.errors import RunFailed
from echelon.parallel.servers.messages import ASKS_TO_STOP
from echelon.training.servers.members import ElasticServed
from tests.training.servers.test_served import push


def served(*, bound: int = 1, workers: int = 2, meets: Callable[[int], bool] | None = None) -> Any:
    """Return the first server of workers that are there from the start."""
    server = ElasticServed(
        updates=Updates(kind="asynchronous", max_staleness=bound, min_workers=1),
        clocks=[0] * workers,
        update=lambda pushes, staleness: None,
        snapshot=list,
        decides=True,
    )
    if meets is not None:
        server.loop_meets = meets
    server.begin(0, dict.fromkeys(range(workers), 0))
    return server


class Waiting:
    """Call something in a thread, which may have to wait."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.found: list[Any] = []
        self._thread = Thread(target=lambda: self.found.append(call()), daemon=True)
        self._thread.start()

    def waits(self) -> bool:
        """Return whether it has not returned soon."""
        self._thread.join(timeout=0.3)
        return self._thread.is_alive()

    def result(self) -> Any:
        """Return what it returns."""
        self._thread.join(timeout=20)
        return self.found[0]


def test_a_lost_worker_holds_back_nobody() -> None:
    """S07: the bound is over those that are there."""
    server = served(bound=1)
    server.take(push(0, 0, 0))
    ahead = Waiting(lambda: server.take(push(0, 1, 1)))
    assert ahead.waits()

    server.lose(1, 0)

    assert ahead.result().version == 2
    (change,) = list(server.changes)[2:]
    assert (change.worker, change.step, change.version, change.there) == (1, 0, 2, False)


def test_a_worker_comes_in_where_all_meet_two_steps_ahead_of_the_fastest() -> None:
    """S07: told to workers, so that the other servers hear of it; nobody goes beyond."""
    server = served(bound=2)
    server.lose(1, 0)
    came = Waiting(lambda: server.arrive(1, 1, lambda: False))
    assert came.waits()
    assert server.pause_after == 2

    assert server.take(push(0, 0, 0)).stop_after == -3
    held = Waiting(lambda: server.take(push(0, 1, 1, -3)))
    assert held.waits()
    server.wait_for(2)
    server.meet(2, lambda: {1: 1})

    assert held.result().stop_after == 0
    assert came.result().loss == 2
    assert server.clocks == [2, 2]
    assert server.there == {0, 1}
    assert not server.waiting


def test_who_has_not_come_to_every_server_waits_for_the_next_meeting() -> None:
    """S07: the first server calls it at once."""
    server = served(bound=2)
    server.lose(1, 0)
    came = Waiting(lambda: server.arrive(1, 1, lambda: False))
    assert came.waits()
    server.take(push(0, 0, 0))
    held = Waiting(lambda: server.take(push(0, 1, 1)))
    assert held.waits()
    server.meet(2, dict)

    assert held.result().stop_after == -5
    assert server.pause_after == 4
    server.end()
    assert came.result() is None


def test_an_earlier_attempt_gives_way() -> None:
    """S07: the worker was started once more while it waited."""
    server = served()
    server.lose(1, 0)
    assert server.arrive(1, 1, lambda: True) is None
    assert not server.waiting


def test_everything_rests_where_the_loop_says() -> None:
    """S07: no answer to the step of a checkpoint before it is written."""
    server = served(meets=lambda step: step == 1)
    held = [Waiting(lambda worker=worker: server.take(push(worker, 0, 0))) for worker in (0, 1)]
    assert all(one.waits() for one in held)
    server.wait_for(1)
    server.meet(1, dict)
    assert sorted(one.result().version for one in held) == [2, 2]


def test_a_stop_waits_for_a_meeting_and_is_asked_for_again() -> None:
    """S07: one number travels with answers: a step to meet after, or one to stop after."""
    server = served(bound=3)
    server.pause_after = 2
    server.request_stop()
    assert server.stop_after == 0
    server.take(push(0, 0, 0, ASKS_TO_STOP))
    assert server.stop_after == 0
    server.take(push(1, 0, 0))
    server.pause_after = 0
    assert server.take(push(0, 1, 1, ASKS_TO_STOP)).stop_after == server.stop_after == 4


def test_another_server_hears_of_a_meeting_by_the_push_that_gets_there() -> None:
    """S07: of one that is over it hears no more."""
    server = served(bound=3)
    server.decides = False
    server.take(push(0, 0, 0, -4))
    assert server.pause_after == 3
    server.pause_after, server.opened = 0, 3
    server.take(push(1, 0, 0, -4))
    assert server.pause_after == 0


def test_the_loss_of_a_step_is_the_mean_of_what_was_pushed() -> None:
    """S07: of the workers that are there."""
    server = served()
    server.lose(1, 0)
    server.take(push(0, 0, 0))
    assert server.facts_of(0) == (0.5, 1.0, 1)


def test_without_a_worker_the_run_ends() -> None:
    """S07: the last one is lost before another is back."""
    server = served()
    server.lose(0, 0)
    for _ in range(2):
        server.lose(1, 0)
    with pytest.raises(RunFailed) as ended:
        server.wait_for(1)
    assert ended.value.rules == ("workers-are-there",)


def test_workers_that_leave_are_not_lost() -> None:
    """S07: they have done all their steps."""
    server = served()
    for worker in (0, 1):
        server.leave(worker)
    assert server.error is None
    assert all(change.there for change in server.changes)


def test_nobody_comes_in_where_the_run_ends() -> None:
    """S07: who waits is told so, and no meeting is called for it."""
    server = served(bound=2, meets=lambda step: step == 1)
    server.lose(1, 0)
    came = Waiting(lambda: server.arrive(1, 1, lambda: False))
    assert came.waits()
    held = Waiting(lambda: server.take(push(0, 0, 0)))
    assert held.waits()

    server.end()
    server.meet(1, dict)

    assert came.result() is None
    assert held.result().version == 1
    assert server.there == {0}
