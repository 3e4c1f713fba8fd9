"""How far ahead a worker was, from the recorded order."""

from __future__ import annotations

from echelon.core.choices.updates import AppliedGradient, WorkerChange
from echelon.proof.asynchronous.claims import slowest, steps_there


def one(worker: int, step: int, read: int, version: int) -> AppliedGradient:
    return AppliedGradient(worker=worker, step=step, read=read, version=version)


def test_the_slowest_is_that_of_the_version_that_was_read() -> None:
    """S07: steps done in the updates before a version."""
    applied = [one(0, 0, 0, 0), one(0, 1, 1, 1), one(1, 0, 0, 2), one(0, 2, 2, 3)]

    assert [slowest(applied, version, 2) for version in range(5)] == [0, 0, 0, 1, 1]
    assert [one.staleness for one in applied] == [0, 0, 2, 1]


def change(worker: int, step: int, version: int, *, there: bool) -> WorkerChange:
    return WorkerChange(worker=worker, attempt=0, step=step, version=version, there=there)


CHANGES = (
    change(0, 0, 0, there=True),
    change(1, 0, 0, there=True),
    change(1, 1, 3, there=False),
    change(1, 4, 5, there=True),
)


def test_a_worker_that_is_lost_is_slower_than_nobody() -> None:
    """S07: from the version at which it was lost to that at which it is back, at a later step."""
    applied = [one(0, 0, 0, 0), one(1, 0, 0, 1), one(0, 1, 1, 2), one(0, 2, 3, 3), one(0, 3, 4, 4)]
    applied += [one(0, 4, 5, 5), one(1, 4, 5, 6)]

    found = [slowest(applied, version, 2, CHANGES) for version in range(8)]

    assert found == [0, 0, 1, 2, 3, 4, 4, 5]


def test_steps_are_those_between_coming_and_going() -> None:
    """S07: with nothing told of changes, all."""
    assert steps_there(CHANGES, 1, 6) == {0, 4, 5}
    assert steps_there(CHANGES, 0, 6) == set(range(6))
    assert steps_there((), 1, 3) == {0, 1, 2}
