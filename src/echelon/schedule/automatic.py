# SPDX-License-Identifier: Apache-2.0
"""Search for a schedule that is faster than every fixed one, for given times and memory.

Three steps, none of which looks at a clock, so that the same times always give the same schedule:

1. *Start* from every fixed schedule that fits, as it is and with its backward passes split, and
   from list scheduling under many orders of urgency (`list_scheduling.py`).
2. *Justify* the best of them, and shake the best of those.
3. *Fuse* B and W again wherever this costs nothing; where splitting costs time, search also among
   schedules in which only the first and last microbatches are split.

It ends as soon as the lower bound (`lower_bound.py`) is reached. The idea of ordering F, B and W by
search under a memory limit is that of Qi et al., "Zero Bubble Pipeline Parallelism"
(arXiv 2401.10241), section 3.1.

To *justify* (forward-backward improvement: Li and Willis 1992; Valls, Ballestin and Quintanilla
2005, for project scheduling) is to build the step again from its end, where the action that could
end latest goes first, and then from its start, where the action that must start first goes first.
Idle time between actions moves to one end of the step, and the other end comes nearer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from types import MappingProxyType

from echelon.core.errors import InfeasiblePlan, Problem
from echelon.core.rulebook.pipeline import SCHEDULE_SEARCH_HAS_MEMORY
from echelon.schedule.action import Schedule
from echelon.schedule.build import SCHEDULES, build_schedule, schedule_problems
from echelon.schedule.check import peak_in_flight_per_rank
from echelon.schedule.list_scheduling import ListScheduler, SplitMask
from echelon.schedule.lower_bound import lower_bound
from echelon.schedule.simulate import Durations, simulate
from echelon.schedule.timer import BW, ActionRows, B, F, ScheduleTimer, ScheduleTimes, W

AUTO = "auto"
"""The name of a schedule that was found by search."""


_Orders = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
"""Which orders of urgency are tried in list scheduling, each with each.

How many cycles earlier (-) or later F is wanted than its turn, how many cycles later than its B a W
is, and how patient a rank is.
"""

_WIDE: _Orders = ((-1e6, -8, -4, -2, -1, 0, 1, 1e6), (0, 2, 4, 8, 1e6), (0, 0.5, 1))
_NARROW: _Orders = ((-1e6, -4, -1, 0, 1), (0, 4, 1e6), (0, 1))
_KEPT = 12  # orders that are refined
_LEAST_KEPT = 3
"""How many starts are justified."""
_ACTIONS_AT_FULL_EFFORT = 4096
"""In a longer step, fewer orders are tried, so that the search takes seconds there too."""
_ROUNDS = 4
"""How often a start is justified at most."""
_SHAKES = (40, 20)
"""How often the best is shaken, before and after B and W are fused."""
_SEED = 0  # of the shakes


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSchedule:
    """Hold the best schedule found, and what it is compared with.

    `fixed` has the makespan of every fixed schedule that has these stages and microbatches and
    keeps within the memory limit.
    """

    schedule: Schedule
    makespan_s: float
    lower_bound_s: float
    fixed: Mapping[str, float]


def find_schedule(
    stage_ranks: tuple[int, ...],
    num_microbatches: int,
    durations: Durations,
    *,
    most_in_flight: tuple[int, ...] | None = None,
) -> FoundSchedule:
    """Return the best schedule found for these stages, named "auto".

    `most_in_flight[r]` is the most (stage, microbatch) pairs whose activations rank `r` may hold,
    from the start of F to the end of BW or W; None is no limit. InfeasiblePlan where a rank may
    not even hold its own stages once.
    """
    clock = ScheduleTimer(stage_ranks, num_microbatches, durations)
    limits = _limits(clock, most_in_flight)
    fixed = {
        one.name: one
        for one in _fixed(clock)
        if all(n <= most for n, most in zip(peak_in_flight_per_rank(one), limits, strict=True))
    }
    bound = lower_bound(stage_ranks, num_microbatches, durations, limits)
    search = _Search(clock, ListScheduler(clock, limits), bound)
    best = search.run(list(fixed.values()))
    schedule = clock.schedule_of(best.rows, AUTO)
    makespan = best.timing.makespan_s
    return FoundSchedule(
        schedule=schedule,
        makespan_s=makespan,
        lower_bound_s=min(bound, makespan),
        fixed=MappingProxyType(
            {name: simulate(one, durations).makespan_s for name, one in fixed.items()}
        ),
    )


def _limits(clock: ScheduleTimer, most_in_flight: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the limit of each rank; no more than it has cells."""
    ranks = range(clock.num_ranks)
    stages = [clock.stage_ranks.count(rank) for rank in ranks]
    cells = tuple(count * clock.num_microbatches for count in stages)
    if most_in_flight is None:
        return cells
    limits = tuple(min(pair) for pair in zip(most_in_flight, cells, strict=True))
    if problem := memory_problem(stages, limits):
        raise InfeasiblePlan([problem])
    return limits


def memory_problem(stages: Sequence[int], most_in_flight: Sequence[int]) -> Problem | None:
    """Return why ranks that hold so much cannot run so many stages; None where they can."""
    short = [rank for rank, count in enumerate(stages) if most_in_flight[rank] < count]
    if short:
        held = ", ".join(
            f"rank {rank} has {stages[rank]} stages and may hold {most_in_flight[rank]}"
            for rank in short[:4]
        )
        return SCHEDULE_SEARCH_HAS_MEMORY.problem(
            f"no schedule keeps within the memory limit: {held}, but a microbatch is held once "
            "for each stage before its backward pass comes back",
            key="pipeline.most_in_flight",
            suggestions=[max(stages), "auto"],
        )
    return None


def _fixed(clock: ScheduleTimer) -> Iterator[Schedule]:
    """Yield every fixed schedule with these stages on these ranks, that runs them one way only."""
    for name in SCHEDULES:
        stages, ranks, m = clock.num_stages, clock.num_ranks, clock.num_microbatches
        if schedule_problems(name, num_stages=stages, num_ranks=ranks, num_microbatches=m):
            continue
        schedule = build_schedule(name, num_stages=stages, num_ranks=ranks, num_microbatches=m)
        if schedule.stage_ranks == clock.stage_ranks and not schedule.mirrored:
            yield schedule


@dataclass(frozen=True, slots=True)
class _Search:
    """Search among the schedules of one clock; stop at `bound`."""

    clock: ScheduleTimer
    scheduler: ListScheduler
    bound: float

    def run(self, fixed: Sequence[Schedule]) -> TimedSchedule:
        """Return the best schedule found; at least as good as each of the `fixed` ones."""
        starts = self._fixed_starts(fixed)
        num_actions = 3 * self.clock.num_stages * self.clock.num_microbatches
        effort = min(1.0, _ACTIONS_AT_FULL_EFFORT / num_actions)
        for place, split in enumerate(self._splits(all_ends=effort == 1)):
            if starts and self._reached(shortest_schedule(starts)):
                break
            orders = _WIDE if place == 0 and effort == 1 else _NARROW
            starts += self._list_scheduled(split, orders)
        best = shortest_schedule(self._refined(starts, kept=max(_LEAST_KEPT, int(effort * _KEPT))))
        for rounds in _SHAKES:
            if not self._reached(best):
                best = perturb_schedule(
                    self.scheduler, best, rounds=int(effort * rounds), seed=_SEED
                )
            best = fuse_backward(self.clock, best)
        return best

    def _reached(self, found: TimedSchedule) -> bool:
        return found.timing.makespan_s <= self.bound * (1 + 1e-12)

    def _fixed_starts(self, fixed: Sequence[Schedule]) -> list[TimedSchedule]:
        starts: list[TimedSchedule] = []
        for schedule in fixed:
            rows = self.clock.rows_of(schedule)
            found = [
                TimedSchedule.from_rows(self.clock, one)
                for one in (rows, split_backward(self.clock, rows))
            ]
            starts += [one for one in found if one is not None]
        return starts

    def _splits(self, *, all_ends: bool) -> list[SplitMask]:
        """Return which cells to split: all; where that costs time, also none, or the ends only."""
        clock, durations = self.clock, self.clock.durations
        stages, m = clock.num_stages, clock.num_microbatches
        costs = any(
            b + w > bw * (1 + 1e-9)
            for b, w, bw in zip(
                durations.input_gradient_s,
                durations.weight_gradient_s,
                durations.backward_s,
                strict=True,
            )
        )
        p = clock.num_ranks
        ends = [(m, 0)]
        if costs:
            ends += [(0, 0), (0, p)]
        if costs and all_ends:
            ends += [(0, p // 2), (0, 2 * p), (p // 2, p // 2), (p, p)]
        cells = {tuple(k < first or k >= m - last for k in range(m)): None for first, last in ends}
        return [[list(one)] * stages for one in cells]

    def _list_scheduled(self, split: SplitMask, orders: _Orders) -> Iterator[TimedSchedule]:
        for eagerness, laziness in product(*orders[:2]):
            urgency = self._urgency(eagerness, laziness)
            for patience in orders[2]:
                rows = self.scheduler.build(urgency, split, patience=patience)
                found = TimedSchedule.from_rows(self.clock, rows)
                if found is not None:
                    yield found

    def _urgency(self, eagerness: float, laziness: float) -> list[float]:
        """Return when each action would start if one microbatch followed another without waiting.

        Microbatch k is k cycles behind the first; a cycle is the work of the busiest rank.
        """
        clock, durations = self.clock, self.clock.durations
        stages, m = clock.num_stages, clock.num_microbatches
        forward, backward = [0.0] * stages, [0.0] * stages
        time, work = 0.0, [0.0] * clock.num_ranks
        for stage in range(stages):
            forward[stage] = time
            code = (F * stages + stage) * m
            time += durations.forward_s[stage] + clock.transfer_of[code]
        for stage in reversed(range(stages)):
            backward[stage] = time
            code = (B * stages + stage) * m
            time += durations.input_gradient_s[stage] + clock.transfer_of[code]
        for code, rank in enumerate(clock.rank_of[: BW * stages * m : m]):
            work[rank] += clock.duration_of[code * m]
        cycle = max(work)
        weight = [start + laziness * cycle for start in backward]
        forward = [start + eagerness * cycle for start in forward]
        priorities = {F: forward, B: backward, W: weight, BW: backward}
        return [
            priorities[kind][s] + k * cycle
            for kind in priorities
            for s in range(stages)
            for k in range(m)
        ]

    def _refined(self, starts: Sequence[TimedSchedule], *, kept: int) -> Iterator[TimedSchedule]:
        """Yield the starts, and the best of them justified, until the bound is reached."""
        distinct: dict[float, TimedSchedule] = {}
        for start in sorted(starts, key=lambda one: one.cost):
            distinct.setdefault(round(start.ends_s / (self.bound or 1.0), 9), start)
            yield start
        for start in list(distinct.values())[:kept]:
            for patience in (1.0, 0.5):
                found = justify_repeatedly(self.scheduler, start, patience, rounds=_ROUNDS)
                yield found
                if self._reached(found):
                    return


@dataclass(frozen=True, slots=True, eq=False)
class TimedSchedule:
    """Hold a schedule with its times; `ends_s` is the sum of when the ranks are done."""

    rows: ActionRows
    timing: ScheduleTimes
    ends_s: float

    @classmethod
    def from_rows(cls, clock: ScheduleTimer, rows: ActionRows) -> TimedSchedule | None:
        """Time `rows`; None where they cannot run."""
        timing = clock.run(rows)
        if timing is None:
            return None
        last = (row[-1] for row in rows)
        ends = sum(timing.start_s[code] + clock.duration_of[code] for code in last)
        return cls(rows, timing, ends)

    @property
    def cost(self) -> tuple[float, float]:
        """Return what makes one schedule better than another: its end, then those of its ranks."""
        return self.timing.makespan_s, self.ends_s


def shortest_schedule(found: Iterable[TimedSchedule | None]) -> TimedSchedule:
    """Return the best; the first of equals."""
    return min((one for one in found if one is not None), key=lambda one: one.cost)


def split_cells(clock: ScheduleTimer, rows: ActionRows) -> list[list[bool]]:
    """Return which cells of a schedule have B and W."""
    m = clock.num_microbatches
    split = [[False] * m for _ in range(clock.num_stages)]
    for row in rows:
        for code in row:
            kind_and_stage, microbatch = divmod(code, m)
            kind, stage = divmod(kind_and_stage, clock.num_stages)
            if kind == W:
                split[stage][microbatch] = True
    return split


def justify(scheduler: ListScheduler, found: TimedSchedule, patience: float) -> TimedSchedule:
    """Return the better of the schedule shifted to its end, and that shifted to its start."""
    clock = scheduler.clock
    split = split_cells(clock, found.rows)
    late = clock.latest_starts(found.timing)
    ends = [start + own for start, own in zip(late, clock.duration_of, strict=True)]
    shifted = TimedSchedule.from_rows(
        clock, scheduler.build(ends, split, patience=patience, backwards=True)
    )
    if shifted is None:
        return found
    late = clock.latest_starts(shifted.timing)
    rows = scheduler.build(late, split, patience=patience)
    return shortest_schedule((shifted, TimedSchedule.from_rows(clock, rows)))


def justify_repeatedly(
    scheduler: ListScheduler, found: TimedSchedule, patience: float, *, rounds: int
) -> TimedSchedule:
    """Justify until it no longer helps, at most `rounds` times."""
    best = found
    for _ in range(rounds):
        found = justify(scheduler, found, patience)
        if found.cost >= best.cost:
            break
        best = found
    return best


def perturb_schedule(
    scheduler: ListScheduler, found: TimedSchedule, *, rounds: int, seed: int
) -> TimedSchedule:
    """Disturb the order of a schedule at random, justify, and keep what is not worse."""
    clock = scheduler.clock
    rng = random.Random(seed)
    cycle = found.timing.makespan_s / clock.num_microbatches
    best = found
    for _ in range(rounds):
        reach, share = cycle * rng.choice((0.3, 1, 3)), rng.choice((0.1, 1))
        late = [
            start + rng.uniform(-reach, reach) if rng.random() < share else start
            for start in clock.latest_starts(found.timing)
        ]
        rows = scheduler.build(
            late, split_cells(clock, found.rows), patience=rng.choice((0.5, 1.0))
        )
        other = TimedSchedule.from_rows(clock, rows)
        if other is None:
            continue
        other = shortest_schedule((other, justify(scheduler, other, rng.choice((0.5, 1.0)))))
        if other.timing.makespan_s <= found.timing.makespan_s:
            found = other
        best = shortest_schedule((best, found))
    return best


def fuse_backward(clock: ScheduleTimer, found: TimedSchedule) -> TimedSchedule:
    """Return the schedule with B and the W directly behind it made one wherever this costs nothing.

    A BW sends its gradient later than its B did: it is worth that where it takes less time than
    both, and harmless where nobody waits. The pairs are tried in parts, ever smaller ones, those
    first that could start latest without a longer step.
    """
    pairs = _pairs(clock, found)
    best = found
    for parts in _PARTS:
        size = max(1, -(-len(pairs) // parts))
        left: list[int] = []
        for start in range(0, len(pairs), size):
            chosen = pairs[start : start + size]
            other = TimedSchedule.from_rows(clock, _fuse(clock, best.rows, chosen))
            if other is not None and other.cost <= best.cost:
                best = other
            else:
                left += chosen
        pairs = left
    return best


_PARTS = (1, 4, 16, 64)  # of a list


def _pairs(clock: ScheduleTimer, found: TimedSchedule) -> list[int]:
    """Return each B that its W follows directly, those with the most slack first."""
    width = clock.num_stages * clock.num_microbatches
    late, start = clock.latest_starts(found.timing), found.timing.start_s
    pairs = [
        code
        for row in found.rows
        for code, after in pairwise(row)
        if code // width == B and after == code + (W - B) * width
    ]
    return sorted(pairs, key=lambda code: start[code] - late[code])


def _fuse(clock: ScheduleTimer, rows: ActionRows, chosen: Sequence[int]) -> ActionRows:
    width = clock.num_stages * clock.num_microbatches
    heads = set(chosen)
    tails = {code + (W - B) * width for code in chosen}
    return [
        [code + (BW - B) * width if code in heads else code for code in row if code not in tails]
        for row in rows
    ]


def split_backward(clock: ScheduleTimer, rows: ActionRows) -> ActionRows:
    """Return the schedule with each BW made a B and a W."""
    width = clock.num_stages * clock.num_microbatches
    return [
        [
            one
            for code in row
            for one in (
                (code - (BW - B) * width, code - (BW - W) * width)
                if code // width == BW
                else (code,)
            )
        ]
        for row in rows
    ]
