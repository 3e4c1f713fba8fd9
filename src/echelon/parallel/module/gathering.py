# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 3 for any module: what of its parameters is whole, and when.

Split: as in `zero.py`.
Sent:  one all-gather per bucket before its forward and one before its backward; one for both where
       it is kept whole in between (the root's, and what the first step showed to be irregular).
Bytes: `module_bytes` in `tests/parallel/module/sent_bytes.py`.
Must divide: nothing; buckets are padded.
Source: Rajbhandari et al., "ZeRO", 2020; Zhao et al., "PyTorch FSDP", 2023 (units, prefetch).

`hooks.py` says which unit is used when. A parameter whose bucket is freed reads as NaN: who
reads it by another way than through the module sees so at once, where the memory is gone.

No tensors and no ranks: the first step notes what happened, `agree_on_order` makes one order of
what all ranks noted, and a `GatherSchedule` follows it. Every rank goes through a sweep from its
beginning to its end whatever its own forward does, so gathers always find their partners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from echelon.core.errors import RunFailed
from echelon.core.plan import Zero
from echelon.core.rulebook.module import UNIT_OUT_OF_ORDER
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.transport.collectives import Group
from echelon.parallel.zero import ParameterGathering

UnitEvent = tuple[Literal["enter", "leave"], str]
"""A unit begins or ends its forward, or its backward."""


class ModuleParameterGathering(ParameterGathering):
    """Gather and free buckets as sweeps over the units say, as `ParameterGathering` does."""

    def __init__(self, buckets: Sequence[Bucket], shard: Group, zero: Zero) -> None:
        """Keep everything whole for each pass until there is an order to `follow`."""
        super().__init__(buckets, [], (shard, shard), zero)
        self._named = {bucket.name: bucket for bucket in buckets}
        self._views = {one.name: [slot.parameter.data for slot in one.slots] for one in self.sliced}
        self._hidden: set[str] = set()
        self.frees = zero.reshard_after_forward
        self.on_passed: Callable[[Bucket], None] = lambda _: None
        self.follow(UnitOrder())
        self.free_all()

    def follow(self, order: UnitOrder) -> None:
        """Gather and free the units of `order` one by one from now on."""
        users = {
            bucket.name: bucket.plan.units
            for bucket in self.sliced
            if order.units.issuperset(bucket.plan.units)
        }
        self.kept = [bucket for bucket in self.sliced if bucket.name not in users]
        self.forward = GatherSchedule(order.forward, users, ahead=self._zero.prefetch)
        self.backward = GatherSchedule(order.backward, users, ahead=self._zero.prefetch)

    def enter_unit(self, sweep: GatherSchedule, unit: str) -> None:
        """Make a unit whole in its turn; free what is over, start on what comes."""
        if sweep.passed(unit):
            raise out_of_order(unit, "its turn has passed")
        turn = sweep.enter(unit)
        self._pass(sweep, turn.over)
        self._join(sweep, turn.skipped)
        for name in turn.gather:
            self._gather_missing(self._named[name])
        for name in turn.after if len(self._reads) < num_buffers(self._zero) else ():
            self._read(self._named[name])
        for name in sweep.buckets_of(unit):
            self._await(self._named[name])

    def leave_unit(self, sweep: GatherSchedule, unit: str) -> None:
        """Free what no later unit of a sweep uses."""
        self._pass(sweep, sweep.leave(unit))

    def complete(self, sweep: GatherSchedule) -> None:
        """Go to the end of a sweep: take part in gathers of what this rank did not use."""
        live, skipped = sweep.end()
        self._pass(sweep, live)
        self._join(sweep, skipped)

    def gather_kept(self) -> None:
        """Make whole what does not come and go."""
        for bucket in self.kept:
            self._gather_missing(bucket)
        for bucket in self.kept:
            self._await(bucket)

    def free_kept(self) -> None:
        """Free what does not come and go."""
        for bucket in self.kept if self.frees else ():
            self._free(bucket)

    def make_all_whole(self) -> None:
        """Make everything whole; all ranks do so together."""
        for bucket in self.sliced:
            self._gather_missing(bucket)
            self._await(bucket)

    def free_all(self) -> None:
        """Free everything, and begin all sweeps anew."""
        self.forward.restart()
        self.backward.restart()
        self.end_pass()

    def _join(self, sweep: GatherSchedule, names: Sequence[str]) -> None:
        """Take part in gathers of what this rank does not use."""
        for name in names:
            self._gather_missing(self._named[name])
            self._await(self._named[name])
            self._pass(sweep, [name])

    def _pass(self, sweep: GatherSchedule, names: Sequence[str]) -> None:
        for name in names:
            if self.frees:
                self._free(self._named[name])
            if sweep is self.backward:
                self.on_passed(self._named[name])

    def _gather_missing(self, bucket: Bucket) -> None:
        if bucket.values_memory.present:
            return
        while bucket.offload_store is not None and len(self._reads) >= num_buffers(self._zero):
            self._await(self._named[next(iter(self._reads))])
        self._gather(bucket)

    def _await(self, bucket: Bucket) -> None:
        super()._await(bucket)
        if bucket.name in self._hidden and bucket.values_memory.present:
            self._hidden.discard(bucket.name)
            for slot, view in zip(bucket.slots, self._views[bucket.name], strict=True):
                slot.parameter.data = view

    def _free(self, bucket: Bucket) -> None:
        super()._free(bucket)
        if bucket.name in self._hidden:
            return
        self._hidden.add(bucket.name)
        nothing = bucket.values.new_full((), float("nan"))
        for slot in bucket.slots:
            slot.parameter.data = nothing.expand(slot.spec.shape)


def num_buffers(zero: Zero) -> int:
    """Return how many slices of parameters may be on their way from where they rest."""
    return zero.offload_buffers + zero.prefetch


def out_of_order(unit: str, why: str) -> RunFailed:
    """Return the error of a unit that is used when it cannot be whole."""
    return RunFailed(
        UNIT_OUT_OF_ORDER.problem(
            f"{unit} is not whole on this rank: {why}",
            suggestions=(
                "units=[...] with the modules that hold these units",
                'zero.reshard_after_forward = "never"',
            ),
        )
    )


@dataclass(slots=True)
class FirstStepTrace:
    """What one rank saw in its first step: the events of each pass, and units to be kept whole.

    `irregular` units were computed with outside of what their module's forward shows.
    """

    forwards: list[list[UnitEvent]] = field(default_factory=list[list[UnitEvent]])
    backwards: list[list[UnitEvent]] = field(default_factory=list[list[UnitEvent]])
    irregular: set[str] = field(default_factory=set[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOrder:
    """Hold the events of the units that are gathered one by one, in forward and in backward."""

    forward: tuple[UnitEvent, ...] = ()
    backward: tuple[UnitEvent, ...] = ()

    @property
    def units(self) -> frozenset[str]:
        """Return the units that are gathered one by one."""
        return frozenset(unit for _, unit in self.forward)


def agree_on_order(ranks: Sequence[FirstStepTrace]) -> UnitOrder:
    """Return the order of what all `ranks` did alike: the same on each of them.

    A unit has its place where it was used once in each forward and once in each backward (or in
    none), by every rank, and in one order with the others.
    """
    forwards = [one for noted in ranks for one in (noted.forwards or [[]])]
    backwards = [one for noted in ranks for one in (noted.backwards or [[]])]
    irregular = {unit for noted in ranks for unit in noted.irregular}
    forward = _common(forwards, irregular)
    used_back = {unit for one in backwards for _, unit in one}
    backward = _common(backwards, irregular)
    fine = {unit for _, unit in forward}
    fine -= used_back - {unit for _, unit in backward}
    return UnitOrder(
        forward=tuple(event for event in forward if event[1] in fine),
        backward=tuple(event for event in backward if event[1] in fine),
    )


def _common(passes: Sequence[Sequence[UnitEvent]], without: Iterable[str]) -> list[UnitEvent]:
    """Return the events of the units that every pass has once, in the same place."""
    left = {unit for one in passes for _, unit in one} - set(without)
    for one in passes:
        entered = [unit for kind, unit in one if kind == "enter"]
        left_once = [unit for kind, unit in one if kind == "leave"]
        left = {u for u in left if entered.count(u) == 1 and left_once.count(u) <= 1}
    while True:
        kept = [[event for event in one if event[1] in left] for one in passes]
        bad = {
            event[1]
            for one in kept
            for place in range(max(len(one), len(kept[0])))
            if one[place : place + 1] != kept[0][place : place + 1]
            for event in (*one[place : place + 1], *kept[0][place : place + 1])
        }
        if not bad:
            return kept[0] if kept else []
        left -= bad


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherActions:
    """Name the buckets that are over, those that were left out, those to gather, and the next."""

    over: list[str]
    skipped: list[str]
    gather: list[str]
    after: list[str]


class GatherSchedule:
    """Say, as units are used, which buckets are to be gathered now and which can be freed.

    Buckets are gathered in one order, each once. A bucket of several units is whole from the first
    to the last of them; one that nobody leaves is whole to the end.
    """

    def __init__(
        self, events: Sequence[UnitEvent], users: Mapping[str, Sequence[str]], *, ahead: int
    ) -> None:
        """Follow `events`; `users` are the units of each bucket, gathered `ahead` units early."""
        self._ticks = {event: tick for tick, event in enumerate(events)}
        self._enters = [tick for tick, (kind, _) in enumerate(events) if kind == "enter"]
        self._ahead = ahead
        spans = {
            bucket: (
                min(self._ticks["enter", unit] for unit in units if ("enter", unit) in self._ticks),
                max(self._ticks.get(("leave", unit), inf) for unit in units),
            )
            for bucket, units in users.items()
            if any(("enter", unit) in self._ticks for unit in units)
        }
        self._users = users
        self._first = {bucket: span[0] for bucket, span in spans.items()}
        self._last = {bucket: span[1] for bucket, span in spans.items()}
        self._order = sorted(spans, key=self._first.__getitem__)
        self.restart()

    def restart(self) -> None:
        """Go back to the beginning."""
        self._tick, self._next = -1, 0
        self._live: list[str] = []

    def follows(self, unit: str) -> bool:
        """Return whether the unit has a place in this sweep."""
        return ("enter", unit) in self._ticks

    def passed(self, unit: str) -> bool:
        """Return whether the turn of a unit is over: what it needs may be freed already."""
        return self._ticks["enter", unit] <= self._tick

    def buckets_of(self, unit: str) -> list[str]:
        """Return the buckets that a unit uses, of those that this sweep gathers."""
        return [bucket for bucket in self._order if unit in self._users[bucket]]

    def ends(self) -> list[str]:
        """Return all buckets in the order in which they are over."""
        return sorted(self._order, key=self._last.__getitem__)

    def enter(self, unit: str) -> GatherActions:
        """Return what is to be done as `unit` begins; its turn must not have passed."""
        assert not self.passed(unit), f"the turn of {unit} has passed"
        tick = self._tick = self._ticks["enter", unit]
        later = [one for one in self._enters if one > tick]
        horizon = [tick, *later][min(self._ahead, len(later))]
        start = self._next
        while self._next < len(self._order) and self._first[self._order[self._next]] <= horizon:
            self._next += 1
        over = self._over(before=tick)
        coming = self._order[start : self._next]
        skipped = [bucket for bucket in coming if self._last[bucket] < tick]
        gather = [bucket for bucket in coming if self._last[bucket] >= tick]
        self._live += gather
        after = self._order[self._next : self._next + 1]
        return GatherActions(over=over, skipped=skipped, gather=gather, after=after)

    def leave(self, unit: str) -> list[str]:
        """Return what to free as `unit` ends."""
        tick = self._ticks.get(("leave", unit), -1)
        if tick <= self._tick:
            return []
        self._tick = tick
        return self._over(before=tick + 1)

    def end(self) -> tuple[list[str], list[str]]:
        """Return what to free, and what then to gather and free at once: what nobody used here."""
        skipped = self._order[self._next :]
        live = self._live
        self.restart()
        return live, skipped

    def _over(self, *, before: int) -> list[str]:
        over = [bucket for bucket in self._live if self._last[bucket] < before]
        self._live = [bucket for bucket in self._live if bucket not in over]
        return over
