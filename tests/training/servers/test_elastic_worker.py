"""A worker takes its first step where the servers say, from what they have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from echelon.launch.context import RankContext
from echelon.parallel.servers.links import PairLinks
from echelon.parallel.servers.messages import Reply
from echelon.training.servers.elastic_worker import ElasticWorker


class _Recorder:
    rank = 1

    def waiting(self, what: str) -> Any:
        assert what == "the servers"
        return pytest.MonkeyPatch.context()


@pytest.mark.parametrize(("told", "done"), [(7.0, 7), (0.0, 0), (-1.0, None)])
def test_a_worker_begins_where_the_servers_say(
    monkeypatch: pytest.MonkeyPatch, told: float, done: int | None
) -> None:
    """S07: after so many steps; nowhere where the run is over. It hears of a meeting, too."""
    met: list[int] = []
    monkeypatch.setattr(PairLinks, "meet_servers", lambda self, attempt: met.append(attempt) or [])
    worker = ElasticWorker.__new__(ElasticWorker)
    messages = SimpleNamespace(
        join=lambda attempt, buckets: Reply(version=3, loss=told, stop_after=-9)
    )
    parts = {
        "groups": SimpleNamespace(recorder=_Recorder()),
        "plan": None,
        "messages": messages,
        "model": SimpleNamespace(buckets=()),
    }
    for name, part in parts.items():
        setattr(worker, name, part)

    found = worker.join(cast(RankContext, SimpleNamespace(store=None, attempt=2)), 1.0)

    assert found == done
    assert met == [2]
    assert worker._stop_after == -9
    worker._hear(0)
    assert worker._stop_after == 0
