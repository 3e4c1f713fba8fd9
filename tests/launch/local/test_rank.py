"""What a rank says of its own error: a fault of it, or only news that another one is gone."""

from __future__ import annotations

from typing import cast

import pytest

from echelon.core.errors import RunFailed
from echelon.core.rulebook.launch import LAUNCHER_LOST
from echelon.launch.context import RankContext, RankProgress
from echelon.launch.local.messages import (
    Channel,
    Limits,
    Notice,
    RankJob,
    TargetReference,
    ThreadStacks,
    channel_pair,
)
from echelon.launch.local.rank import (
    HeartbeatThread,
    call_target,
    fault_from_error,
    is_connection_error,
)
from echelon.launch.root_cause import FaultKind

JOB = RankJob(
    number=1,
    target=TargetReference(module="json", name="loads"),
    argument=None,
    labels=("",),
    backend="gloo",
    port=0,
    limits=Limits(),
    introduce=False,
)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (ConnectionResetError("reset"), True),
        (RuntimeError("[gloo/pair.cc] Connection closed by peer [127.0.0.1]:3"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        # A word alone is not enough: it is torch that says so, in a RuntimeError.
        (ValueError("connection closed by peer"), False),
    ],
)
def test_a_lost_connection_is_news_of_another_rank(error: Exception, lost: bool) -> None:
    assert is_connection_error(error) is lost
    kind = FaultKind.CONNECTION if lost else FaultKind.RAISED
    assert fault_from_error(error, 2).kind is kind


def test_our_own_error_about_a_lost_connection_is_news_of_another_rank() -> None:
    error = RunFailed(LAUNCHER_LOST.problem("in step 3"))
    error.__cause__ = RuntimeError("Connection reset by peer")
    fault = fault_from_error(error, 2)
    assert (fault.kind, fault.error) == (FaultKind.CONNECTION, error)


def test_a_fault_shows_the_target_and_not_what_called_it() -> None:
    def target(_context: RankContext, argument: object) -> None:
        raise KeyError(argument)

    with pytest.raises(KeyError) as caught:
        call_target(target, cast("RankContext", None), "inside")
    fault = fault_from_error(caught.value, 3)
    assert (fault.rank, fault.summary, fault.error) == (3, "KeyError: 'inside'", None)
    assert "in target" in fault.detail
    assert "in call_target" not in fault.detail


def test_an_error_for_users_travels_whole() -> None:
    error = RunFailed(LAUNCHER_LOST.problem("it is gone"))
    assert fault_from_error(error, 0).error is error


def hear(channel: Channel) -> object:
    """Return the next message within ten seconds."""
    return next(iter(channel.receive(10.0)))


def test_requests_are_taken_until_the_supervisor_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []
    monkeypatch.setattr("echelon.launch.local.rank.end_process", ends.append)
    ours, end = channel_pair(send_timeout_s=5.0)
    theirs = Channel(end)
    progress = RankProgress()
    heartbeat = HeartbeatThread(theirs, progress)
    progress.enter("all_reduce", turn=4)
    heartbeat.start()
    ours.send(Notice.STOP)
    ours.send(Notice.TELL_STACKS)
    told = hear(ours)
    assert isinstance(told, ThreadStacks)
    assert (told.waiting, told.turn) == ("all_reduce", 4)
    assert "test_requests_are_taken" in told.text
    assert progress.stop_requested()
    ours.send(JOB)
    ours.send(Notice.STOP)
    assert heartbeat.inbox.get(timeout=10.0) == JOB
    progress.reset()  # as the main thread does, which has only begun with the job
    ours.send(Notice.NO_MORE_JOBS)
    assert heartbeat.inbox.get(timeout=10.0) is Notice.NO_MORE_JOBS
    ours.close()
    heartbeat.join(10.0)
    theirs.close()
    assert progress.stop_requested(), "a stop that comes right behind its job is kept"
    assert ends == ["the supervisor is gone"]
