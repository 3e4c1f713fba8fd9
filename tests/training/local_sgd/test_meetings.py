"""Who is at a meeting, whether it counts, and who comes in: several ranks over one store."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from echelon.core.errors import RunFailed
from echelon.core.event import NoEvents
from echelon.launch.context import LostRank
from echelon.layout.islands import Island
from echelon.parallel.transport.recorder import Recorder
from echelon.training.local_sgd.meetings import IslandMeetings, Meeting, Said


class Run:
    """Hold the ranks of islands of two, what the launcher has told, and a store."""

    def __init__(self, islands: int = 3) -> None:
        self.store, self.lost = HashStore(), list[LostRank]()
        self.ranks = {(i, place): self.rank(i, place) for i in range(islands) for place in (0, 1)}
        self.islands = islands
        self.all_do(lambda one: one.begin(0))

    def rank(self, island: int, place: int, attempt: int = 0) -> IslandMeetings:
        """Return one rank."""
        return IslandMeetings(
            island=Island(index=island, first_rank=2 * island, size=2),
            num_islands=3,
            place=place,
            store=self.store,
            recorder=Recorder(2 * island + place, NoEvents()),
            lost=self.lost,
            message_s=20.0,
            stay=(attempt, 0),
        )

    def lose(self, island: int, attempt: int = 0) -> None:
        """Have the launcher tell of a loss, and the island do nothing more."""
        lost = LostRank(rank=2 * island + 1, attempt=attempt, cause="killed", returns=True)
        self.lost.append(lost)
        self.ranks = {key: one for key, one in self.ranks.items() if key[0] != island}

    def all_do(self, work: Callable[[IslandMeetings], Any]) -> list[Any]:
        """Return what all ranks that are left return, each in a thread."""
        found: dict[tuple[int, int], Any] = {}
        threads = [
            Thread(target=lambda key=key, one=one: found.setdefault(key, work(one)), daemon=True)
            for key, one in self.ranks.items()
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join(timeout=30)
        assert len(found) == len(self.ranks), "some rank waits for ever"
        return [found[key] for key in sorted(found)]

    def meet(self, key: str, step: int, *, admits: bool = True) -> Meeting:
        """Return the meeting that all ranks come to; they find the same."""
        found = self.all_do(
            lambda one: one.meet(key, step, Said(loss=1.0, tokens=2), admits=admits)
        )
        assert all(one == found[0] for one in found)
        return found[0]


def test_all_who_are_there_meet_and_one_verdict_counts() -> None:
    run = Run()
    meeting = run.meet("meet/2/0", 2)

    assert sorted(meeting.members) == [0, 1, 2]
    assert meeting.mean_loss == 1.0
    assert run.all_do(lambda one: one.counts(meeting, whole=True)) == [True] * 6


def test_a_lost_island_is_left_out_and_told_of() -> None:
    run = Run()
    run.lose(1)
    meeting = run.meet("meet/2/0", 2)

    assert sorted(meeting.members) == [0, 2]
    (change,) = meeting.changes
    assert (change.island, change.step, change.there, change.cause) == (1, 0, False, "killed")


def test_a_meeting_of_which_one_rank_lacks_a_part_counts_for_nobody() -> None:
    """Half of an outer step: rank 1 of island 0 has not got the sums, all others have."""
    run = Run()
    meeting = run.meet("meet/2/0", 2)
    short = run.ranks[0, 1]

    assert run.all_do(lambda one: one.counts(meeting, whole=one is not short)) == [False] * 6


def test_a_meeting_of_which_a_member_dies_before_it_says_so_counts_for_nobody() -> None:
    """All who are left have their sums, and nobody sees a broken connection."""
    run = Run()
    meeting = run.meet("meet/2/0", 2)
    run.lose(2)

    assert run.all_do(lambda one: one.counts(meeting, whole=True)) == [False] * 4
    assert sorted(run.meet("meet/2/1", 2).members) == [0, 1]


def test_one_that_dies_after_all_have_everything_is_in_the_mean() -> None:
    run = Run()
    meeting = run.meet("meet/2/0", 2)
    assert all(run.all_do(lambda one: one.counts(meeting, whole=True)))
    run.lose(2)
    assert all(run.all_do(lambda one: one.counts(meeting, whole=True)))


def test_an_island_that_waits_at_the_door_comes_in_at_a_meeting_that_admits() -> None:
    run = Run()
    run.lose(1)
    for step, admits in ((2, False), (4, True)):
        back = [run.rank(1, place, attempt=1) for place in (0, 1)]
        if not admits:
            run.store.set("waits/1", "1.0")
        meeting = run.meet(f"meet/{step}/0", step, admits=admits)
        run.all_do(lambda one, meeting=meeting: one.commit(meeting))
        assert meeting.joins == ({1: (1, 0)} if admits else {})
    for one in back:
        assert one.wait_at_the_door() == meeting
    assert [(one.there, one.step) for one in meeting.changes] == [(False, 0), (True, 4)]
    assert run.ranks[0, 0].there == {0: (0, 0), 1: (1, 0), 2: (0, 0)}


def test_one_that_did_not_get_everything_waits_once_more() -> None:
    run = Run()
    run.lose(1)
    run.store.set("waits/1", "1.0")
    meeting = run.meet("meet/2/0", 2)
    run.all_do(lambda one: one.commit(meeting))
    run.store.set("waits/1", "1.1")

    again = run.meet("meet/4/0", 4)
    assert sorted(again.members) == [0, 2]
    assert again.joins == {1: (1, 1)}
    assert [one.there for one in again.changes] == [False, True, False, True]


def test_who_asks_to_stop_lets_nobody_in() -> None:
    run = Run()
    run.lose(1)
    run.store.set("waits/1", "1.0")
    said = Said(asks=1)
    found = run.all_do(lambda one: one.meet("meet/2/0", 2, said, admits=True))
    assert found[0].joins == {}
    assert found[0].asks == 2


def test_who_comes_back_when_all_is_over_or_nobody_is_left_is_told() -> None:
    run = Run(islands=3)
    for island in range(3):
        run.lose(island)
    late = run.rank(0, 0, attempt=1)
    with pytest.raises(RunFailed) as failed:
        late.wait_at_the_door()
    assert failed.value.rules == ("islands-are-there",)
    late.end()
    assert run.rank(1, 0, attempt=1).wait_at_the_door() is None
