# SPDX-License-Identifier: Apache-2.0
"""Time many schedules of the same stages: the model of `simulate.py`, without its events.

A search asks for thousands of makespans. So an action is a number here, what it needs and makes is
looked up in flat lists, and nothing is kept but start times. `ScheduleTimer.run` gives to the last
bit the makespan that `simulate` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.schedule.action import Action, Schedule
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
