# SPDX-License-Identifier: Apache-2.0
"""Who is at a meeting of islands that may be lost, and whether it counts: for all ranks or none.

    every rank   counts in the store that it has come
    first ranks  propose who is there, once each island of the run has come or is lost: the first
                 proposal counts (compare-and-set), and every rank reads it
    every rank   sums what islands moved with the ranks of its place, and counts that it has all;
                 the last one writes the verdict "apply", who loses a member writes "drop"
    every rank   reads the verdict before it changes anything; after a drop it comes once more

An island that was started again waits at the door. Where a proposal lets it in, the first island
that met gives it what islands agree on, rank to rank of the same place; if it does not get all of
that it waits for the next meeting (its next `Stay`). The store is the launcher's: no island takes
it away.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from echelon.core.axis import Axis
from echelon.core.choices.local_sgd import IslandChange
from echelon.core.errors import RunFailed
from echelon.core.rulebook.islands import ISLANDS_ARE_THERE
from echelon.launch.context import LostRank
from echelon.launch.process_group import PrefixStore, Store
from echelon.layout.islands import Island
from echelon.parallel.transport.pair import StoreGroup
from echelon.parallel.transport.recorder import Recorder

LOOKS_EVERY_S = 0.02
"""Seconds between two looks whether all have come."""

ASKS_FOR_S = 0.5
"""Seconds for which the store is asked for a verdict before losses are looked at."""

APPLY, DROP = "apply", "drop"

Stay = tuple[int, int]
"""How often an island was started again, and how often it has waited at the door since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Hold what an island says when it comes to a meeting."""

    asks: int = 0
    """How many of its ranks ask to stop."""
    loss: float = 0.0
    """The mean loss of its last step."""
    tokens: int = 0
    """The tokens that this is the mean of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Say who is at a meeting: the same to every rank of every island that is."""

    key: str
    """What it is called in the store."""
    step: int
    """Steps that are done when it is over."""
    members: Mapping[int, Stay]
    """The islands that meet."""
    joins: Mapping[int, Stay]
    """Those that come in at its end."""
    changes: tuple[IslandChange, ...]
    """Who came and was lost in the whole run, by its end."""
    said: Mapping[int, Said]
    """What each of them said."""

    @property
    def asks(self) -> int:
        """Return how many ranks ask to stop."""
        return sum(one.asks for one in self.said.values())

    @property
    def mean_loss(self) -> float:
        """Return the mean over the tokens of all that meet."""
        tokens = sum(one.tokens for one in self.said.values())
        return sum(one.loss * one.tokens for one in self.said.values()) / max(1, tokens)

    def to_text(self) -> str:
        """Return the meeting as the store has it."""
        return json.dumps(
            {
                "step": self.step,
                "members": sorted((one, *stay) for one, stay in self.members.items()),
                "joins": sorted((one, *stay) for one, stay in self.joins.items()),
                "changes": [asdict(one) for one in self.changes],
                "said": {str(island): asdict(one) for island, one in self.said.items()},
            }
        )

    @classmethod
    def from_text(cls, key: str, text: bytes) -> Meeting:
        """Return the meeting that the store has under a key."""
        told: dict[str, Any] = json.loads(text)
        return cls(
            key=key,
            step=told["step"],
            members={island: (a, b) for island, a, b in told["members"]},
            joins={island: (a, b) for island, a, b in told["joins"]},
            changes=tuple(IslandChange(**one) for one in told["changes"]),
            said={int(island): Said(**one) for island, one in told["said"].items()},
        )


@dataclass(slots=True, kw_only=True)
class IslandMeetings:
    """Bring one rank of an island to meetings."""

    island: Island
    """The island of this rank."""
    num_islands: int
    """Islands of a run that has lost none."""
    place: int
    """Which of its ranks this one is."""
    store: Store
    """What the ranks of all islands share."""
    recorder: Recorder
    """What notes waits and bytes."""
    lost: Sequence[LostRank]
    """What the launcher tells of losses: it grows."""
    message_s: float
    """Seconds for which an operation with other islands may take."""
    stay: Stay = (0, 0)
    """Which stay of the island this is."""
    there: dict[int, Stay] = field(default_factory=dict[int, Stay])
    """Who was there when the last meeting was over."""
    changes: tuple[IslandChange, ...] = ()
    """Who came and was lost until then."""
    met: int = 0
    """Steps that were done then."""
    holds: Callable[[Meeting], bool] | None = None
    """What a proof asks whether to let a meeting begin yet."""
    _group: StoreGroup | None = None
    """The ranks of this place in the islands that met last."""
    _group_members: Mapping[int, Stay] = field(default_factory=dict[int, Stay])
    """Which islands those are."""

    def begin(self, step: int) -> None:
        """Meet all islands that begin a run after so many steps."""
        self.there = {one: (0, 0) for one in range(self.num_islands)}
        self.met = step
        self.commit(self.meet("begin", step, Said(), admits=False))

    def meet(
        self,
        key: str,
        step: int,
        said: Said,
        *,
        admits: bool,
        among: Mapping[int, Stay] | None = None,
    ) -> Meeting:
        """Return who is at a meeting after `step` steps, once that is decided.

        It `admits` those who wait at the door, or nobody. It is `among` some islands, or all that
        are there.
        """
        expected = self.there if among is None else among
        here = f"{key}/here/{self.island.index}/{_text(self.stay)}"
        if not self.place:
            self.store.set(f"{here}/said", json.dumps(asdict(said)))
        self.store.add(here, 1)
        decision = f"{key}/decision"
        with self.recorder.waiting("the other islands"):
            while not self.store.check([decision]):
                found = None if self.place else self._proposal(key, step, expected, admits=admits)
                if found is not None:
                    self.store.compare_set(decision, "", found.to_text())
                else:
                    time.sleep(LOOKS_EVERY_S)
        return Meeting.from_text(key, self.store.get(decision))

    def group(self, meeting: Meeting, *, anew: bool) -> StoreGroup:
        """Return the ranks of this place in all islands that meet; RuntimeError where one is lost.

        While the same islands meet it is the same group, unless it is made `anew`.
        """
        if anew or self._group is None or self._group_members != meeting.members:
            self.leave_group()
            ranks = [one * self.island.size + self.place for one in sorted(meeting.members)]
            place = PrefixStore(f"{meeting.key}/ring/{self.place}", self.store)
            axis = Axis.DP_REPLICATE.value
            with self.recorder.waiting("the ranks of this place in other islands"):
                self._group = StoreGroup(axis, ranks, self.recorder, place, self.message_s)
            self._group_members = meeting.members
            self._group.lose_by(
                lambda: any(self.is_lost(one, stay) for one, stay in meeting.members.items())
            )
        return self._group

    def leave_group(self) -> None:
        """Leave the group of before: who waits in it for this rank is told by that."""
        if self._group is not None:
            self._group.close()
        self._group = None

    def counts(self, meeting: Meeting, *, whole: bool) -> bool:
        """Return whether a meeting counts, of which this rank has the `whole`: all ranks agree."""
        if not whole:
            return self._verdict(meeting.key, DROP) == APPLY
        everyone = len(meeting.members) * self.island.size
        if self.store.add(f"{meeting.key}/whole", 1) == everyone:
            return self._verdict(meeting.key, APPLY) == APPLY
        with self.recorder.waiting("what other islands have of the meeting"):
            while True:
                with suppress(RuntimeError):
                    self.store.wait([f"{meeting.key}/verdict"], timedelta(seconds=ASKS_FOR_S))
                    return self._verdict(meeting.key, DROP) == APPLY
                if any(self.is_lost(one, stay) for one, stay in meeting.members.items()):
                    return self._verdict(meeting.key, DROP) == APPLY

    def commit(self, meeting: Meeting) -> None:
        """Go on from a meeting that counts; let in who comes in."""
        self.there = {**meeting.members, **meeting.joins}
        self.changes, self.met = meeting.changes, meeting.step
        if self.place or self.island.index not in meeting.members:
            return
        self.store.set("roll", json.dumps(sorted(self.there.items())))
        admitted = json.dumps({"key": meeting.key, "met": meeting.to_text()})
        for island, stay in meeting.joins.items():
            self.store.set(f"admitted/{island}/{_text(stay)}", admitted)

    def wait_at_the_door(self) -> Meeting | None:
        """Wait to be let in; return the meeting at whose end that is, None if all is over.

        RunFailed where nobody is left who could let this island in.
        """
        if not self.place:
            self.store.set(f"waits/{self.island.index}", _text(self.stay))
        admitted = f"admitted/{self.island.index}/{_text(self.stay)}"
        with self.recorder.waiting("a meeting to come in at"):
            while not self.store.check([admitted]):
                if self.store.check(["over"]):
                    return None
                self._require_somebody()
                time.sleep(5 * LOOKS_EVERY_S)
        told: dict[str, Any] = json.loads(self.store.get(admitted))
        return Meeting.from_text(told["key"], told["met"].encode())

    def pair(self, meeting: Meeting, giver: int, island: int) -> StoreGroup:
        """Return the pair of the ranks of this place in two islands; RuntimeError if one is lost.

        The first end is that of the giver.
        """
        ends = (giver * self.island.size + self.place, island * self.island.size + self.place)
        stay = _text(meeting.joins[island])
        place = PrefixStore(f"{meeting.key}/gift/{island}/{stay}/{self.place}", self.store)
        return StoreGroup(Axis.DP_REPLICATE.value, ends, self.recorder, place, self.message_s)

    def within(self, key: str) -> Store:
        """Return a part of the store that nobody else uses."""
        return PrefixStore(key, self.store)

    def end(self) -> None:
        """Say that no meeting follows."""
        self.store.set("over", "1")

    def is_lost(self, island: int, stay: Stay) -> bool:
        """Return whether a stay of an island has ended."""
        return self._cause_of(island, stay) is not None

    def forget(self, key: str) -> None:
        """Remove what the store has of a meeting that every rank has left."""
        if self.place or self.island.index != min(self.there):
            return
        names = ["decision", "verdict", "whole"]
        for one, stay in self.there.items():
            names += [f"here/{one}/{_text(stay)}", f"here/{one}/{_text(stay)}/said"]
        for name in names:
            self.store.delete_key(f"{key}/{name}")

    def _proposal(
        self, key: str, step: int, expected: Mapping[int, Stay], *, admits: bool
    ) -> Meeting | None:
        """Return who of `expected` is there; None while one may still come."""
        said: dict[int, Said] = {}
        losses: list[IslandChange] = []
        for island, stay in expected.items():
            here = f"{key}/here/{island}/{_text(stay)}"
            if self.store.check([here]) and self.store.add(here, 0) == self.island.size:
                said[island] = Said(**json.loads(self.store.get(f"{here}/said")))
                continue
            cause, door = self._cause_of(island, stay), self._stay_at_door(island)
            # One that waits again in the same process has not got all that it was to get.
            if cause is None and (door is None or door == stay or door[0] > stay[0]):
                return None
            losses.append(
                IslandChange(
                    island=island,
                    attempt=stay[0],
                    step=self.met,
                    there=False,
                    cause=cause or "it did not get all of what islands agree on",
                )
            )
        members = {island: expected[island] for island in said}
        admits = admits and not any(one.asks for one in said.values())
        joins = self._at_the_door(members) if admits else {}
        came = [
            IslandChange(island=island, attempt=stay[0], step=step, there=True)
            for island, stay in joins.items()
        ]
        found = Meeting(
            key=key,
            step=step,
            members=members,
            joins=joins,
            changes=(*self.changes, *losses, *came),
            said=said,
        )
        return None if self.holds is not None and self.holds(found) else found

    def _at_the_door(self, members: Mapping[int, Stay]) -> dict[int, Stay]:
        """Return who waits to come in."""
        doors = {one: self._stay_at_door(one) for one in range(self.num_islands)}
        return {
            one: stay
            for one, stay in doors.items()
            if one not in members and stay is not None and not self.is_lost(one, stay)
        }

    def _stay_at_door(self, island: int) -> Stay | None:
        """Return the stay of an island that waits or has waited at the door."""
        if not self.store.check([f"waits/{island}"]):
            return None
        attempt, ticket = map(int, self.store.get(f"waits/{island}").decode().split("."))
        return attempt, ticket

    def _cause_of(self, island: int, stay: Stay) -> str | None:
        """Return how a stay of an island ended; None where it has not."""
        for one in self.lost:
            if one.rank // self.island.size == island and one.attempt >= stay[0]:
                return one.cause
        return None

    def _require_somebody(self) -> None:
        if self.place or not self.store.check(["roll"]):
            return
        roll = json.loads(self.store.get("roll"))
        others = [(one, tuple(stay)) for one, stay in roll if one != self.island.index]
        if all(self.is_lost(one, stay) for one, stay in others):
            raise RunFailed(
                ISLANDS_ARE_THERE.problem(
                    "every island was lost before one that was started again was back"
                )
            )

    def _verdict(self, key: str, wanted: str) -> str:
        """Write a verdict unless there is one; return the one that counts."""
        return self.store.compare_set(f"{key}/verdict", "", wanted).decode()


def _text(stay: Stay) -> str:
    return f"{stay[0]}.{stay[1]}"
