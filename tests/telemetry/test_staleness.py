"""The staleness of each worker, from the events of servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.choices.updates import AppliedGradient
from echelon.core.event import APPLY, Event
from echelon.telemetry.events import EventWriter
from echelon.telemetry.staleness import staleness_of_run
from tests.parallel.servers.test_server import served_plan
from tests.training.servers.test_served import with_updates

ORDER = [(0, 0, 0, 0), (1, 0, 0, 1), (0, 1, 1, 2), (1, 1, 2, 3), (0, 2, 3, 4)]


@pytest.mark.system("S07")
def test_each_worker_has_a_histogram(tmp_path: Path) -> None:
    """S07: staleness is version less read; what was taken again counts as it was last."""
    plan = with_updates(served_plan(2, 1), 2)
    writer = EventWriter(tmp_path, 2)
    for worker, step, read, version in [(0, 2, 0, 4), *ORDER]:
        one = AppliedGradient(worker=worker, step=step, read=read, version=version)
        assert AppliedGradient.from_event(one.event_name) == one
        writer.record(Event(kind=APPLY, name=one.event_name, rank=2))
    writer.close()

    first, second = staleness_of_run(tmp_path, plan)

    assert first.histogram == {0: 1, 1: 2}
    assert second.histogram == {1: 2}
    assert (first.num_applied, first.mean) == (3, 2 / 3)


def test_synchronous_servers_have_none(tmp_path: Path) -> None:
    """S06: no gradient is stale."""
    assert staleness_of_run(tmp_path, served_plan(2, 1)) == ()
