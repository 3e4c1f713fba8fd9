# SPDX-License-Identifier: Apache-2.0
"""Times of many schedules of the same stages, and of one schedule under many plans.

A search asks for thousands of makespans. So an action is a number here, what it needs and makes is
looked up in flat lists, and nothing is kept but start times. `ScheduleTimer.run` gives to the last
bit the makespan that `simulate` gives.

A `FlatSchedule` is timed for many plans. The lists of ranks fix which action comes before which,
whatever the durations; so a schedule is put into one order once, in which each action stands after
all that it needs, and a plan's durations run through that order. Messages take no time here. To the
last bit the result is that of `schedule/simulate.py` for durations without transfers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from echelon.schedule.action import Action, ActionKind, Schedule
from echelon.schedule.build import build_schedule
from echelon.schedule.simulate import KINDS, Durations

F, B, W, BW = range(4)

ActionRows = list[list[int]]
"""The actions of each rank, as numbers, in order."""


@dataclass(frozen=True, slots=True)
class ScheduleTimes:
    """Hold when the actions of a schedule start; `order` has each after all that it needs."""

    makespan_s: float
    start_s: list[float]
    order: list[int]


class ScheduleTimer:
    """Time schedules of given stages, microbatches and durations.

    The number of an action is `(kind x stages + stage) x microbatches + microbatch`.
    """

    def __init__(
        self, stage_ranks: tuple[int, ...], num_microbatches: int, durations: Durations
    ) -> None:
        """Look everything up once; every rank owns a stage."""
        stages, m = len(stage_ranks), num_microbatches
        self.stage_ranks = stage_ranks
        self.num_stages = stages
        self.num_microbatches = m
        self.num_ranks = max(stage_ranks) + 1
        self.durations = durations
        seconds = durations.by_kind
        channels: dict[tuple[int, int], int] = {}
        self.duration_of: list[float] = []
        self.rank_of: list[int] = []
        self.need_of: list[int] = []
        self.made_by: list[int] = []
        self.channel_of: list[int] = []
        self.transfer_of: list[float] = []
        for kind in (F, B, W, BW):
            ahead = 1 if kind == F else -1
            side = 0 if kind == F else stages * m
            for stage, rank in enumerate(stage_ranks):
                before, after = stage - ahead, stage + ahead
                needs = kind != W and 0 <= before < stages
                makes = kind != W and 0 <= after < stages
                crosses = makes and stage_ranks[after] != rank
                channel, transfer = -1, 0.0
                if crosses:
                    channel = channels.setdefault((rank, stage_ranks[after]), len(channels))
                    transfer = durations.transfer_s[min(stage, after)]
                self.duration_of += [seconds[kind][stage]] * m
                self.rank_of += [rank] * m
                self.need_of += [side + before * m + k if needs else -1 for k in range(m)]
                self.made_by += [side + stage * m + k if makes else -1 for k in range(m)]
                self.channel_of += [channel] * m
                self.transfer_of += [transfer] * m
        self.num_channels = len(channels)

    def rows_of(self, schedule: Schedule) -> ActionRows:
        """Return the actions of `schedule` as numbers."""
        number = {kind: place for place, kind in enumerate(KINDS)}
        stages, m = self.num_stages, self.num_microbatches
        return [
            [(number[one.kind] * stages + one.stage) * m + one.microbatch for one in row]
            for row in schedule.actions
        ]

    def schedule_of(self, rows: Sequence[Sequence[int]], name: str) -> Schedule:
        """Return the schedule whose ranks run `rows`."""
        return Schedule(
            name=name,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            stage_ranks=self.stage_ranks,
            actions=tuple(tuple(self.action_of(code) for code in row) for row in rows),
        )

    def action_of(self, code: int) -> Action:
        """Return the action with this number."""
        kind_and_stage, microbatch = divmod(code, self.num_microbatches)
        kind, stage = divmod(kind_and_stage, self.num_stages)
        return Action(KINDS[kind], stage, microbatch)

    def run(self, rows: ActionRows) -> ScheduleTimes | None:
        """Return when everything starts; None where ranks wait for one another for ever."""
        duration_of, need_of, made_by = self.duration_of, self.need_of, self.made_by
        channel_of, transfer_of = self.channel_of, self.transfer_of
        arrived = [-1.0] * (2 * self.num_stages * self.num_microbatches)
        start = [0.0] * len(duration_of)
        link = [0.0] * self.num_channels
        order: list[int] = []
        heads = [iter(row) for row in rows]
        free = [0.0] * len(rows)
        held: list[int] = [next(head, -1) for head in heads]
        waiting: dict[int, int] = {}
        ready = list(range(len(rows)))
        while ready:
            rank = ready.pop()
            code, time, head = held[rank], free[rank], heads[rank]
            while code >= 0:
                need = need_of[code]
                if need >= 0:
                    arrival = arrived[need]
                    if arrival < 0:
                        waiting[need] = rank
                        break
                    time = max(time, arrival)
                start[code] = time
                order.append(code)
                time += duration_of[code]
                made = made_by[code]
                if made >= 0:
                    channel = channel_of[code]
                    if channel < 0:
                        arrived[made] = time
                    else:
                        sent = max(time, link[channel])
                        link[channel] = arrived[made] = sent + transfer_of[code]
                    if made in waiting:
                        ready.append(waiting.pop(made))
                code = next(head, -1)
            held[rank], free[rank] = code, time
        if len(order) < sum(map(len, rows)):
            return None
        return ScheduleTimes(max(free), start, order)

    def latest_starts(self, timing: ScheduleTimes) -> list[float]:
        """Return how late each action could start without a longer step, in the same order.

        Where that is its start, the action lies on a critical path.
        """
        latest = [0.0] * len(self.duration_of)
        rank_latest = [timing.makespan_s] * self.num_ranks
        link_latest = [timing.makespan_s] * self.num_channels
        wanted = [timing.makespan_s] * (2 * self.num_stages * self.num_microbatches)
        for code in reversed(timing.order):
            rank = self.rank_of[code]
            end, made, channel = rank_latest[rank], self.made_by[code], self.channel_of[code]
            if channel >= 0:
                send = min(link_latest[channel], wanted[made]) - self.transfer_of[code]
                link_latest[channel] = send
                end = min(end, send)
            elif made >= 0:
                end = min(end, wanted[made])
            latest[code] = rank_latest[rank] = end - self.duration_of[code]
            if self.need_of[code] >= 0:
                wanted[self.need_of[code]] = latest[code]
        return latest


KEPT = 128
"""Orders of one search that are kept: finalists share few of them."""


@dataclass(frozen=True, slots=True)
class FlatSchedule:
    """Hold the actions of a schedule in an order that works.

    Of each: its rank, what it needs (a place in this order, or itself where it needs nothing), and
    its lane: one kind on one stage, kind x stages + stage.
    `rows` are the lanes of each rank's actions in the rank's own order.
    """

    num_ranks: int
    num_stages: int
    ranks: list[int]
    needs: list[int]
    duration_index: list[int]
    rows: tuple[list[int], ...]

    def makespan_s(self, durations: Durations) -> float:
        """Return how long all actions take; transfers are free."""
        seconds = list(chain(*durations.by_kind))
        free = [0.0] * self.num_ranks
        ends = [0.0] * len(self.ranks)
        actions = zip(self.ranks, self.needs, self.duration_index, strict=True)
        for place, (rank, need, index) in enumerate(actions):
            start, arrived = free[rank], ends[need]
            free[rank] = ends[place] = (arrived if arrived > start else start) + seconds[index]
        return max(free)

    def busy_s(self, durations: Durations) -> list[float]:
        """Return how long each rank computes."""
        seconds = list(chain(*durations.by_kind))
        return [
            sum(seconds[index] * count for index, count in Counter(row).items())
            for row in self.rows
        ]


@lru_cache(maxsize=KEPT)
def build_flat_schedule(
    name: str, num_stages: int, num_ranks: int, num_microbatches: int
) -> FlatSchedule:
    """Return the lanes of a schedule by its name and numbers."""
    return flatten_schedule(
        build_schedule(
            name, num_stages=num_stages, num_ranks=num_ranks, num_microbatches=num_microbatches
        )
    )


def flatten_schedule(schedule: Schedule) -> FlatSchedule:
    """Return the lanes of a schedule whose ranks do not wait for one another for ever."""
    stages = schedule.num_stages
    number = {kind: place * stages for place, kind in enumerate(KINDS)}
    ranks, needs, duration_index = list[int](), list[int](), list[int]()
    made: dict[tuple[bool, int, int], int] = {}
    waiting: dict[tuple[bool, int, int], int] = {}
    heads = [iter(row) for row in schedule.actions]
    held = [next(head, None) for head in heads]
    ready = list(range(len(heads)))
    while ready:
        rank = ready.pop()
        action = held[rank]
        while action is not None:
            forward, place = action.kind is ActionKind.F, len(ranks)
            before = action.stage - 1 if forward else action.stage + 1
            need = place
            if action.kind is not ActionKind.W and 0 <= before < stages:
                wanted = (forward, before, action.microbatch)
                if wanted not in made:
                    waiting[wanted] = rank
                    break
                need = made[wanted]
            ranks.append(rank)
            needs.append(need)
            duration_index.append(number[action.kind] + action.stage)
            if action.kind is not ActionKind.W:
                result = (forward, action.stage, action.microbatch)
                made[result] = place
                if result in waiting:
                    ready.append(waiting.pop(result))
            action = next(heads[rank], None)
        held[rank] = action
    assert len(ranks) == sum(map(len, schedule.actions)), "a schedule waits for itself"
    rows = tuple([number[one.kind] + one.stage for one in row] for row in schedule.actions)
    return FlatSchedule(schedule.num_ranks, stages, ranks, needs, duration_index, rows)
