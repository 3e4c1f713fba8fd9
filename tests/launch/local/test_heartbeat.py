"""The thread of a rank: what it takes, and the stacks that it tells."""

from __future__ import annotations

import pytest

from echelon.launch.context import RankProgress
from echelon.launch.local.channel import Channel, channel_pair
from echelon.launch.local.heartbeat import HeartbeatThread
from echelon.launch.local.messages import Limits, Notice, RankJob, TargetReference, ThreadStacks

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


def hear(channel: Channel) -> object:
    """Return the next message within ten seconds."""
    return next(iter(channel.receive(10.0)))


def test_requests_are_taken_until_the_supervisor_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []
    monkeypatch.setattr("echelon.launch.local.heartbeat.end_process", ends.append)
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
