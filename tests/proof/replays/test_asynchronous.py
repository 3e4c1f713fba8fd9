"""How far ahead a worker was, from the recorded order."""

from __future__ import annotations

from echelon.core.choices.updates import AppliedGradient
from echelon.proof.replays.asynchronous import slowest


def one(worker: int, step: int, read: int, version: int) -> AppliedGradient:
    return AppliedGradient(worker=worker, step=step, read=read, version=version)


def test_the_slowest_is_that_of_the_version_that_was_read() -> None:
    """S07: steps done in the updates before a version."""
    applied = [one(0, 0, 0, 0), one(0, 1, 1, 1), one(1, 0, 0, 2), one(0, 2, 2, 3)]

    assert [slowest(applied, version, 2) for version in range(5)] == [0, 0, 0, 1, 1]
    assert [one.staleness for one in applied] == [0, 0, 2, 1]
