"""What is told of workers that were lost: steps, rows, and why."""

from __future__ import annotations

import pytest

from echelon.core.choices.updates import WorkerChange
from echelon.launch.context import LostRank
from echelon.training.servers import absences
from echelon.training.servers.absences import AbsenceLog


def change(worker: int, step: int, *, there: bool, attempt: int = 0) -> WorkerChange:
    return WorkerChange(worker=worker, attempt=attempt, step=step, version=2 * step, there=there)


def lost(rank: int, attempt: int = 0, cause: str = "killed") -> LostRank:
    return LostRank(rank=rank, attempt=attempt, cause=cause, returns=True)


def log_of(*changes: WorkerChange) -> AbsenceLog:
    """Return the log of two workers, each with 4 rows of a batch."""
    log = AbsenceLog(num_workers=2, share=4)
    for one in changes:
        log.note(one)
    return log


START = tuple(change(worker, 0, there=True) for worker in (0, 1))


def test_steps_between_count_nowhere() -> None:
    """S07: from the step whose gradient was dropped to the one before it comes back."""
    log = log_of(*START, change(1, 3, there=False), change(1, 7, there=True, attempt=1))

    (one,) = log.told(20, [lost(1)])

    assert (one.worker, one.cause, one.returned) == (1, "killed", True)
    assert (one.first_step, one.last_step) == (4, 7)
    assert (one.first_row, one.last_row) == (4, 7)
    assert (one.num_steps, one.num_sequences) == (4, 16)
    assert one.says() == (
        "worker 1: killed; back with step 8; its 16 sequences of steps 4 to 7 (rows 4 to 7 of each "
        "batch) count nowhere"
    )


def test_a_worker_that_stays_away_misses_all_the_rest() -> None:
    """S07: to the last step of the run; one that is lost twice is told of twice."""
    log = log_of(
        *START,
        change(0, 3, there=False),
        change(0, 3, there=True, attempt=1),
        change(0, 5, there=False, attempt=1),
    )

    first, second = log.told(9, [lost(0), lost(0, 1, "stopped")])

    assert first.says() == "worker 0: killed; back with step 4, no step missed"
    assert (second.cause, second.first_step, second.last_step) == ("stopped", 6, 9)
    assert "not back" in second.says()


def test_a_worker_that_was_never_there_is_missed_from_the_start() -> None:
    """S07: lost before the first step of a run that went on from step 10."""
    log = log_of(change(0, 10, there=True))
    (one,) = log.told(12, [lost(1)])
    assert (one.worker, one.first_step, one.last_step, one.cause) == (1, 11, 12, "killed")


def test_nothing_is_told_of_a_run_that_lost_nobody() -> None:
    """S07: neither at its end nor in its steps."""
    log = log_of(*START)
    assert log.told(5, []) == []
    assert log.news([]) == []


def test_a_loss_is_told_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """S07: which may come a moment later; where nobody knows it, without."""
    log = log_of(*START, change(1, 3, there=False), change(1, 7, there=True, attempt=1))
    assert log.news([]) == []
    assert log.news([lost(1)]) == [
        "worker 1 is lost after 3 steps: killed",
        "worker 1 is back, and begins with step 8",
    ]
    monkeypatch.setattr(absences, "CAUSE_WITHIN_S", 0.0)
    log.note(change(0, 8, there=False))
    assert log.news([]) == ["worker 0 is lost after 8 steps: its connection broke"]
