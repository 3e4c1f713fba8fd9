# SPDX-License-Identifier: Apache-2.0
"""Outer steps of islands that may be lost: a meeting counts for all ranks of all, or for none.

Sent:  per meeting of k islands, one all-reduce over the ranks of a place of each run of a fragment,
       as without losses; to an island that comes back, all outer parameters and momentum.
Bytes: `outer_bytes` and `rejoin_bytes` in `cost/bytes/local_sgd.py`.

All sums of a meeting are in memory before any is applied: who is left applies all or none of them
(`training/local_sgd/meetings.py`). The mean is over the islands that met. One that comes back goes
on from the outer parameters; its inner optimizer begins anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch

from echelon.core.choices.local_sgd import IslandChange
from echelon.core.event import LOST, MEET, THERE, Event
from echelon.launch.context import RankContext
from echelon.layout.islands import island_of
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.transport.collectives import Pending
from echelon.training.local_sgd.checkpoint import ElasticIslandCheckpoint, StoreExchange
from echelon.training.local_sgd.meetings import IslandMeetings, Meeting, Said, Stay
from echelon.training.local_sgd.outer_steps import MAX_IN_FLIGHT, OuterSteps
from echelon.training.steps.part import StepPlace, StepResult


@dataclass(frozen=True, slots=True)
class _Sum:
    """Hold what islands moved in one run of a slice, added up."""

    bucket: Bucket
    run: slice
    moved: torch.Tensor


class ElasticOuterSteps(OuterSteps):
    """Take the outer steps of one rank's slices with the islands that are there."""

    begins_together = False

    def __init__(self, place: StepPlace) -> None:
        """Reserve outer state as `OuterSteps` does; nobody is met before `connect`."""
        super().__init__(place)
        self._plan = place.run
        self._meetings: IslandMeetings | None = None
        self._ends_after = 0
        self._said = Said()
        self._last: Meeting | None = None
        self._saving: Mapping[int, Stay] = {}
        self._told = self._noted = 0
        self.on_sums: Callable[[int], None] | None = None
        self.checkpoint = ElasticIslandCheckpoint(
            place.groups, self._shards, self.take_back, self._writers
        )

    @property
    def meetings(self) -> IslandMeetings:
        """Return where other islands are met."""
        assert self._meetings is not None, "an island is connected before its first step"
        return self._meetings

    def speaks(self, step: int) -> bool:
        """True on the first rank of the islands that took the step.

        An island that comes in at its end has not taken it.
        """
        met = self.meetings
        return not met.place and met.island.index == min(self._there_in(step))

    def facts(self, result: StepResult) -> StepResult:
        """Tokens of the islands that took the step."""
        return replace(result, tokens=result.tokens * len(self._there_in(result.step)))

    def _there_in(self, step: int) -> Mapping[int, Stay]:
        meeting = self.met_after(step)
        return self.meetings.there if meeting is None else meeting.members

    def connect(
        self, context: RankContext, message_s: float, ends_after: int
    ) -> Callable[[], int | None] | None:
        """Learn where islands are met, and after how many steps the run ends.

        Of an island that was started again, the function that waits until it is let in.
        """
        island = island_of(self._plan, context.rank)
        assert island is not None, "there are islands"
        self._ends_after = ends_after
        self._meetings = IslandMeetings(
            island=island,
            num_islands=self._local.islands,
            place=island.local(context.rank),
            store=context.store,
            recorder=self._groups.recorder,
            lost=context.progress.lost,
            message_s=message_s,
            stay=(context.attempt, 0),
        )
        return self._come_in if context.attempt else None

    def _come_in(self) -> int | None:
        """Wait for a meeting, take the outer state from one of its islands, and return its steps.

        None if the run is over before.
        """
        met = self.meetings
        while True:
            # Every rank of the island is ready.
            self._all_ranks(ready=True)
            admitted = met.wait_at_the_door()
            if admitted is None:
                return None
            if self._all_ranks(ready=self._receive(admitted)):
                met.commit(admitted)
                self._last = admitted
                self._told = self._noted = len(admitted.changes)
                self.take_back()
                return admitted.step
            met.stay = (met.stay[0], met.stay[1] + 1)

    def begin(self, step: int) -> None:
        """Begin with all islands there."""
        self.meetings.begin(step)

    def agreed(self, result: StepResult, rows: torch.Tensor) -> StepResult:
        """Return the result without requests to stop: they and the loss are told at the meeting."""
        del rows
        self._said = Said(asks=result.stop_requests, loss=result.loss, tokens=result.tokens)
        return replace(result, stop_requests=0)

    def end_step(self, result: StepResult) -> StepResult:
        """Return who met at the end of a step, and at the end of a round who asks to stop."""
        met = self.met_after(result.step)
        if met is None:
            return result
        asked = met.asks if self.ends_round(result.step - 1) else 0
        return replace(result, stop_requests=asked, islands=tuple(sorted(met.members)))

    def mean_loss(self, loss: float, tokens: int) -> float:
        """Return the mean over the tokens of the islands that met last."""
        return loss if self._last is None else self._last.mean_loss

    def met_after(self, step: int) -> Meeting | None:
        """Return the meeting after so many steps; None where there was none."""
        return self._last if self._last is not None and self._last.step == step else None

    @torch.no_grad()
    def after_update(self, step: int, *, skipped: bool) -> list[Bucket]:
        """Meet the islands that are there and take the outer step, as the end of `step` asks for.

        Return the buckets of which there is something new.
        """
        fragments = self._local.meets_after(step)
        if not fragments:
            return []
        met, done = self.meetings, step + 1
        admits = self._local.ends_round(step) and done < self._ends_after
        for number in count():
            meeting = met.meet(f"meet/{done}/{number}", done, self._said, admits=admits)
            sums = self._sums(meeting, fragments, anew=number > 0)
            if met.counts(meeting, whole=sums is not None):
                break
        assert sums is not None, "a meeting counts of which every rank has all"
        for one in sums:
            self._apply_run(one.bucket, one.run, one.moved.div_(len(meeting.members)))
        changed = [
            one for one in self._buckets if not self._fragments[one.name].isdisjoint(fragments)
        ]
        for bucket in changed:
            if (values := self._values[bucket.name]) is not bucket.value_slice:
                bucket.value_slice.copy_(values)
        previous, self._last = self._last, meeting
        if previous is not None:
            met.forget(previous.key)
        met.commit(meeting)
        self._note(meeting)
        self._give(meeting)
        return changed

    def _writers(self, attempt: int) -> tuple[int, StoreExchange]:
        """The first island that writes a checkpoint, and the ranks of all that do.

        These islands met last. In a later `attempt` those that are left meet once more.
        """
        met, last = self.meetings, self._last
        assert last is not None, "checkpoints are written where rounds end"
        key = f"{last.key}/saved/{attempt}"
        if not attempt:
            self._saving = last.members
        else:
            left = met.meet(key, last.step, self._said, admits=False, among=self._saving)
            self._saving = left.members
        size, members = met.island.size, self._saving
        ranks = [one * size + place for one in sorted(members) for place in range(size)]
        return min(members), StoreExchange(
            met.within(f"{key}/told"),
            ranks,
            met.island.index * size + met.place,
            met.recorder,
            lambda rank: met.is_lost(rank // size, members[rank // size]),
        )

    def news(self) -> Sequence[str]:
        """Islands that came or were lost since the last time, in words."""
        changes, told = self.meetings.changes, self._told
        self._told = len(changes)
        return news_of(changes[told:])

    def end(self, steps: int) -> Sequence[AbsentIsland]:
        """End all meetings, without waiting; the absences of islands."""
        self.meetings.end()
        self.meetings.leave_group()
        share = self._plan.mathematics.global_sequences // self._local.islands
        changes = self.meetings.changes
        return absent_islands(changes, steps, every=self._local.every, share=share)

    def _sums(self, meeting: Meeting, fragments: Sequence[int], *, anew: bool) -> list[_Sum] | None:
        """Return what the islands of a meeting moved, added up; None where one was lost."""
        sums: list[_Sum] = []
        under_way: deque[Pending] = deque()
        try:
            group = self.meetings.group(meeting, anew=anew)
            for bucket in self._buckets:
                outer, values = self._parameters[bucket.name], self._values[bucket.name]
                name = f"outer gradients.{bucket.name}"
                for run in (run for one in fragments for run in self._runs[bucket.name][one]):
                    moved = outer[run] - values[run]
                    under_way.append(group.all_reduce(moved, name=name, async_op=True))
                    sums.append(_Sum(bucket, run, moved))
                    if len(under_way) > MAX_IN_FLIGHT:
                        under_way.popleft().wait()
            if self.on_sums is not None:
                self.on_sums(meeting.step)
            while under_way:
                under_way.popleft().wait()
        except RuntimeError:
            # Whoever waits for this rank in the group must learn that it has left.
            under_way.clear()
            self.meetings.leave_group()
            return None
        return sums

    def _note(self, meeting: Meeting) -> None:
        """Write down who met, and who came and was lost."""
        recorder, now = self._groups.recorder, self._groups.recorder.now()
        names = " ".join(map(str, sorted(meeting.members)))
        told = [(MEET, f"islands {names} of {self._local.islands} after step {meeting.step}")]
        for one in meeting.changes[self._noted :]:
            said = f"begins with step {one.step + 1}" if one.there else f"met after step {one.step}"
            told.append((THERE if one.there else LOST, f"island {one.island} {said}"))
        self._noted = len(meeting.changes)
        for kind, name in told:
            event = Event(kind=kind, name=name, start=now, end=now, rank=recorder.run_rank)
            recorder.sink.record(event)

    def _give(self, meeting: Meeting) -> None:
        """Give what islands agree on to those who come in, where this island is the first."""
        met, giver = self.meetings, min(meeting.members)
        if met.island.index != giver:
            return
        for island in sorted(meeting.joins):
            try:
                pair = met.pair(meeting, giver, island)
                sends = [
                    pair.send(values, 1, name=f"rejoin.{name}", tag=tag)
                    for tag, (name, values) in enumerate(self._agreed())
                ]
                for pending in sends:
                    pending.wait()
            except RuntimeError:
                continue  # it is lost again, or waits for the next meeting

    def _receive(self, meeting: Meeting) -> bool:
        """Take what islands agree on; return whether this rank has all of it."""
        met = self.meetings
        try:
            pair = met.pair(meeting, min(meeting.members), met.island.index)
            for tag, (name, values) in enumerate(self._agreed()):
                pair.receive(values, 0, name=f"rejoin.{name}", tag=tag).wait()
        except RuntimeError:
            return False
        return True

    def _agreed(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Return what islands agree on, in one order on all of them."""
        return [
            (f"{name}.{kind}", flats[name])
            for kind, flats in self.state().items()
            for name in sorted(flats)
            if flats[name].numel()
        ]

    def _all_ranks(self, *, ready: bool) -> bool:
        """Return whether all ranks of this island say the same."""
        row = torch.tensor([int(ready)], device=self._device)
        return bool(self._groups.world.gather_rows(row, name="ready").all())


def outer_steps(place: StepPlace) -> OuterSteps | None:
    """Return the part of a rank; None without islands."""
    local = place.run.mathematics.local_sgd
    kind = ElasticOuterSteps if local.is_elastic else OuterSteps
    return kind(place) if local.active else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentIsland:
    """Loss of an island, and the steps, rounds and rows that it left out."""

    island: int
    """The island."""
    cause: str
    """How it was lost."""
    first_step: int
    """The first step, from 1, of which nothing that it did counts."""
    last_step: int
    """The last one; less than the first where it missed none."""
    first_round: int
    """The first round, from 1, whose end it was not at."""
    last_round: int
    """The last one."""
    first_row: int
    """The first row, from 0, of each of their global batches that it would have read."""
    last_row: int
    """The last one."""
    returned: bool
    """Whether it came back."""

    @property
    def num_steps(self) -> int:
        """Number of steps that the island missed."""
        return max(0, self.last_step - self.first_step + 1)

    @property
    def num_sequences(self) -> int:
        """Number of sequences that count nowhere."""
        return self.num_steps * (self.last_row - self.first_row + 1)

    def says(self) -> str:
        """The loss in words."""
        then = f"back with step {self.last_step + 1}" if self.returned else "not back"
        if not self.num_steps:
            return f"island {self.island}: {self.cause}; {then}, no round missed"
        first, last = self.first_round, self.last_round
        rounds = f"round {first}" if first == last else f"rounds {first} to {last}"
        return (
            f"island {self.island}: {self.cause}; {then}; it missed {rounds}: its "
            f"{self.num_sequences} sequences of steps {self.first_step} to {self.last_step} (rows "
            f"{self.first_row} to {self.last_row} of each batch) count nowhere"
        )


def absent_islands(
    changes: Sequence[IslandChange], steps: int, *, every: int, share: int
) -> Sequence[AbsentIsland]:
    """Absences in a run of `steps` steps in rounds of `every`, in the order of losses.

    `share` are the rows of each global batch that an island reads.
    """
    found: list[AbsentIsland] = []
    away: dict[int, IslandChange] = {}

    def ends(lost: IslandChange, until: int, *, returned: bool) -> None:
        found.append(
            AbsentIsland(
                island=lost.island,
                cause=lost.cause,
                first_step=lost.step + 1,
                last_step=until,
                first_round=lost.step // every + 1,
                last_round=until // every,
                first_row=lost.island * share,
                last_row=(lost.island + 1) * share - 1,
                returned=returned,
            )
        )

    for one in changes:
        if not one.there:
            away[one.island] = one
        elif one.island in away:
            ends(away.pop(one.island), one.step, returned=True)
    for lost in away.values():
        ends(lost, steps, returned=False)
    return sorted(found, key=lambda one: (one.first_step, one.island))


def news_of(changes: Sequence[IslandChange]) -> Sequence[str]:
    """Changes in words."""
    return [
        f"island {one.island} is back, and begins with step {one.step + 1}"
        if one.there
        else f"island {one.island} is lost: what it did after step {one.step} counts nowhere: "
        f"{one.cause}"
        for one in changes
    ]
