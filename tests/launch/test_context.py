"""How far a rank is: what it does, what it waits for, and whether it was asked to stop."""

from __future__ import annotations

import pytest

from echelon.launch.context import RankProgress


def test_each_mark_and_each_wait_is_a_move() -> None:
    progress = RankProgress()
    progress.mark("step 1")
    progress.enter("all_reduce", turn=3)
    assert (progress.count, progress.doing, progress.waiting, progress.turn) == (
        2,
        "step 1",
        "all_reduce",
        3,
    )
    progress.leave()
    # The end of a wait is none: what follows will say so.
    assert (progress.count, progress.waiting, progress.turn) == (2, "", None)


def test_a_wait_ends_whatever_ends_it() -> None:
    progress = RankProgress()
    waits: list[str] = []

    def fail() -> None:
        with progress.waits_for("rank 0"):
            waits.append(progress.waiting)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert waits == ["rank 0"]
    assert progress.waiting == ""


def test_a_new_job_knows_nothing_of_the_one_before() -> None:
    progress = RankProgress()
    progress.mark("step 1")
    progress.read("the loss", lambda: ("all_reduce", 2, 7))
    progress.enter("barrier", turn=1)
    progress.request_stop()
    progress.reset()
    assert progress.stop_requested()  # it may be meant for the job that begins
    progress.clear_stop()
    assert not progress.stop_requested()
    assert (progress.count, progress.doing, progress.waiting, progress.turn) == (0, "", "", None)


def test_a_read_of_the_device_is_a_wait_for_what_the_device_has_not_come_past() -> None:
    progress = RankProgress()
    unfinished: list[tuple[str, int | None, int]] = [("all_gather at F0.1", 4, 9)]
    progress.read("the loss", lambda: unfinished[0] if unfinished else None)
    assert progress.count == 1
    assert progress.waiting == "all_gather at F0.1 (the host reads the loss)"
    assert (progress.turn, progress.unfinished) == (4, 9)
    unfinished.clear()
    assert (progress.waiting, progress.turn) == ("", None)
    unfinished.append(("all_reduce", None, 0))
    assert progress.unfinished is None
    progress.leave()
    assert (progress.waiting, progress.turn) == ("", None)
