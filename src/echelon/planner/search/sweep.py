# SPDX-License-Identifier: Apache-2.0
"""Walk every plan of one world size: memory first, then by bounds, then by the whole formulas.

A row is a mesh with its microbatch; with its ways to share out, its orders and its recompute it is
a few thousand plans. What is walked is complete: a plan is either computed, or left out because

1. its row holds too much even at its leanest: ZeRO over all data ranks, one microbatch in flight,
   recompute or none, whichever holds less;
2. so does its way to share out, or its order, with everything else at its leanest;
3. it cannot be among the best: the seconds that no choice takes from the row, and the least that
   its way to share out and its order add, are together more than the last of the best takes;
4. the same plan with less recompute fits: it is as fast or faster.

Rows come in the order of their steady seconds, so that the first few set the bar, and the walk ends
where the steady seconds alone are above it.

A recommendation walks the same meshes many times: with other memory, with another bar, with
optimizer state on hosts, on larger clusters. A `WorldTable` of so many ranks is made once: the
legal meshes, the seconds of their blocks, and the least that their rows take and hold.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import inf

import numpy as np

from echelon.core.messages.notes import PROGRESS
from echelon.core.plan import Mathematics, Plan
from echelon.core.rulebook.planner import PLAN_FITS_MEMORY
from echelon.cost.inputs.cost_inputs import TrainerConstants
from echelon.cost.inputs.numbers import Array, MachineNumbers, Num
from echelon.cost.peak.fullest_rank import PipelineEnds
from echelon.cost.seconds.trainers import OURS
from echelon.planner.predict.estimate import counted_terms
from echelon.planner.predict.expected import interruptions_of_run
from echelon.planner.search.candidate import (
    FINALISTS,
    BestCandidates,
    ScoredCandidate,
    best_of_groups,
)
from echelon.planner.search.formulas import (
    OptionTable,
    OptionTables,
    RowIndex,
    VectorizedFormulas,
    broadcast_to_array,
    searched_sums,
    take_nested_entries,
)
from echelon.planner.search.legal_meshes import Legality, LegalMeshes, legal_meshes
from echelon.planner.search.options import MOST_VIRTUAL, ScheduleOption, ZeroOption
from echelon.planner.search.request import LONGEST_SEQUENCE, SearchRequest

_ROW_TERMS = (
    *("matmul", "attention", "memory", "host", "head"),
    *("tensor", "context", "expert", "fixed", "stragglers"),
)
"""Terms that neither ways to share out nor orders change; recompute makes none of them less."""
_ZERO_TERMS = ("gather", "gradients", "optimizer")
_SCHEDULE_TERMS = ("bubble", "messages")

FIRST_ROWS = 32  # candidates
MOST_ROWS = 1024  # candidates
PLANS_AT_ONCE = 8192
"""So many that their arrays stay in the cache of a core."""


@dataclass(slots=True)
class SearchCounts:
    """Count the plans of a search: all of them, those computed, and those that hold too much."""

    seen: int = 0
    computed: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])


def _weight(request: SearchRequest, world: int) -> float:
    """Return what a second of a step on so many devices is worth; of risks nothing counts yet."""
    if request.objective in ("time", "devices", LONGEST_SEQUENCE):
        return 1.0
    if request.objective == "expected":
        return interruptions_of_run(request.model, request.software, world).slowdown
    return float(world)


class SearchSweep:
    """Look for the best plans of a request, one world size after another."""

    def __init__(
        self,
        request: SearchRequest,
        *,
        offload: bool = False,
        keep: int | None = None,
        below: float = inf,
    ) -> None:
        """Start with nothing found; plans that are worth `below` or more are left out."""
        self.best = BestCandidates(FINALISTS if keep is None else keep, threshold=below)
        self.counts = SearchCounts()
        self.least_bytes = float("inf")
        self.request = request
        self.offload = offload
        self._bounded = below < inf
        self._options = OptionTables(request, offload=offload)

    def walk(self, world: int) -> None:
        """Walk every plan of `world` ranks; what is found so far stands also when interrupted."""
        request, counts = self.request, self.counts
        before = f", {counts.computed:,} plans computed of {counts.seen:,}" * (counts.seen > 0)
        PROGRESS.info(f"plans of {world} ranks{before}")
        weight = _weight(request, world)
        table = world_table(request, world)
        rows, formulas = table.rows, table.formulas
        self.counts.refused.update(rows.refused)
        if not len(rows):
            return
        self._options = options = table.options(request, offload=self.offload)
        plans = options.num_plans()
        self.counts.seen += int(plans.sum())
        some = np.arange(len(rows), dtype=np.int64)
        if self._bounded:
            # A few rows are fast enough: what the others hold need not be known.
            some = some[weight * self._steady(table, some) < self.best.threshold]
        least = self._leanest(table, some)
        plans = plans[some]
        self.least_bytes = min(self.least_bytes, float(least[plans > 0].min(initial=np.inf)))
        fits = (least <= request.memory_bytes) & (plans > 0)
        self._too_large(int(plans[~fits].sum()))
        index = some[fits]
        if not len(index):
            return
        steady = weight * self._steady(table, index)
        order = np.argsort(steady, kind="stable")
        start, size = 0, FIRST_ROWS
        while start < len(order) and steady[order[start]] < self.best.threshold:
            chunk = order[start : start + size]
            chunk = chunk[steady[chunk] < self.best.threshold]
            self._look(formulas, index[chunk], steady[chunk], weight)
            start, size = start + size, min(2 * size, MOST_ROWS)

    def _look(
        self, formulas: VectorizedFormulas, rows: RowIndex, steady: Array, weight: float
    ) -> None:
        """Look at every plan of some rows."""
        options, memory = self._options, self.request.memory_bytes
        shares, orders = options.zero_options(rows), options.schedule_options(rows)
        lean, most = options.recompute_ends
        ends, room = (lean, most), (self.best.threshold - steady) / weight
        index, numbers = rows[orders.row], orders.numbers
        wait = self._terms(formulas, index, _SCHEDULE_TERMS, **numbers, **lean)
        room_of_shares = room - _least_of_rows(wait, orders.row, len(rows))
        if self._bounded:
            # Most choices are too slow for what is looked for, whatever goes with them.
            shares = shares.kept((room_of_shares > 0.0)[shares.row])
        index, numbers = rows[shares.row], shares.numbers
        data = np.minimum(
            *(self._terms(formulas, index, _ZERO_TERMS, **numbers, **r) for r in ends)
        )
        if self._bounded:
            fast = data < room_of_shares[shares.row]
            shares, data = shares.kept(fast), data[fast]
            fast = wait < (room - _least_of_rows(data, shares.row, len(rows)))[orders.row]
            orders, wait = orders.kept(fast), wait[fast]
        index, numbers = rows[shares.row], shares.numbers
        weights = formulas.ends(index, **numbers)
        held = np.minimum(*(self._held(formulas, index, weights, **numbers, **r) for r in ends))
        in_flight = self._least(formulas, rows[orders.row], **orders.numbers)
        for part, fits in ((shares, held <= memory), (orders, in_flight <= memory)):
            part.fits = fits
        share, order = options.pairs(len(rows), shares, orders)
        some = shares.fits[share] & orders.fits[order]
        self._too_large(int((~some).sum()) * len(options.recomputes))
        share, order = share[some], order[some]
        bound = steady[shares.row[share]] + weight * (data[share] + wait[order])
        first = np.argsort(bound, kind="stable")
        for start in range(0, len(first), PLANS_AT_ONCE):
            part = first[start : start + PLANS_AT_ONCE]
            part = part[bound[part] < self.best.threshold]
            if not len(part):
                break
            self._compute(formulas, rows, (shares, share[part]), (orders, order[part]), weight)

    def _compute(
        self,
        formulas: VectorizedFormulas,
        rows: RowIndex,
        shares: tuple[OptionTable[ZeroOption], RowIndex],
        orders: tuple[OptionTable[ScheduleOption], RowIndex],
        weight: float,
    ) -> None:
        """Compute plans in full, and take those that fit and are good."""
        (of_shares, share), (of_orders, order) = shares, orders
        local = of_shares.row[share]
        index = rows[local]
        numbers: dict[str, Array] = {name: a[share] for name, a in of_shares.numbers.items()}
        numbers |= {name: a[order] for name, a in of_orders.numbers.items()}
        level = self._recomputed(formulas, index, numbers)
        fits = np.flatnonzero(level >= 0)
        self.counts.computed += len(index)
        if not len(fits):
            return
        share, order, index, level = share[fits], order[fits], index[fits], level[fits]
        numbers = {name: column[fits] for name, column in numbers.items()}
        levels = [one.numbers for one in self._options.recomputes]
        again = {name: np.array([one[name] for one in levels])[level] for name in levels[0]}
        total = formulas.seconds(index, **numbers, **again).total
        value = weight * broadcast_to_array(total, len(index))
        good = np.flatnonzero(value < self.best.threshold)
        # How evenly stages are cut, closed forms do not know: each number of them is kept.
        order_of = numbers["schedule"][good] * (MOST_VIRTUAL + 1) + numbers["virtual"][good]
        groups = index[good] * (16 * (MOST_VIRTUAL + 1)) + order_of.astype(np.int64)
        for one in good[best_of_groups(value[good], groups)]:
            row = int(index[one])
            scored = ScoredCandidate(
                value=float(value[one]),
                columns=self._options.columns,
                row=row,
                zero_option=of_shares.option_at(int(share[one])),
                schedule_option=of_orders.option_at(int(order[one])),
                recompute=self._options.recomputes[int(level[one])],
            )
            of_order = (scored.schedule_option.schedule, scored.schedule_option.virtual)
            self.best.add((self._options.world, row, *of_order), scored)
        self.best.drop_surplus()

    def _recomputed(
        self, formulas: VectorizedFormulas, index: RowIndex, numbers: Mapping[str, Array]
    ) -> RowIndex:
        """Return which recompute is the least that fits, -1 where none does."""
        memory = self.request.memory_bytes
        found = np.full(len(index), -1, dtype=np.int64)
        left = np.arange(len(index), dtype=np.int64)
        levels = self._options.recomputes
        last = len(levels) - 1
        every = formulas.ends(index, **numbers)
        for level, option in enumerate(levels):
            part = {name: column[left] for name, column in numbers.items()}
            ends = take_nested_entries(every, left)
            held = self._held(formulas, index[left], ends, **part, **option.numbers)
            fits = held <= memory
            found[left[fits]] = level
            left = left[~fits]
            self._too_large(len(left))
            if level == 0 and last > 1 and len(left):
                # What does not fit with most recompute fits with none in between.
                part = {name: column[left] for name, column in numbers.items()}
                ends = take_nested_entries(every, left)
                held = self._held(formulas, index[left], ends, **part, **levels[last].numbers)
                self._too_large(int((held > memory).sum()) * last)
                left = left[held <= memory]
            if not len(left):
                break
        return found

    def _leanest(self, table: WorldTable, index: RowIndex) -> Array:
        """Return the least that any plan of these rows can hold."""
        choices = self._lean_choices()

        def held(new: RowIndex) -> list[BytesOfRows]:
            return self._held_leanest(table.formulas, new, {})

        name = tuple(tuple(sorted(one.items())) for one in choices)
        found = np.full(len(index), np.inf)
        for one in table.held(name, len(choices), index, held):
            found = np.minimum(found, self._to_fit(one))
        return found

    def _least(self, formulas: VectorizedFormulas, index: RowIndex, **numbers: Num) -> Array:
        """Return the least that plans of these rows can hold with some choices."""
        found = np.full(len(index), np.inf)
        for one in self._held_leanest(formulas, index, numbers):
            found = np.minimum(found, self._to_fit(one))
        return found

    def _lean_choices(self) -> list[dict[str, float]]:
        """Return choices of which one holds least, whatever else is chosen."""
        rest = {"schedule": 0.0, "offload": self._options.offloads}
        ends = [*{tuple(one.items()): one for one in self._options.recompute_ends}.values()]
        return [{"zero": stage, **rest, **again} for stage in (2.0, 3.0) for again in ends]

    def _held_leanest(
        self, formulas: VectorizedFormulas, index: RowIndex, numbers: Mapping[str, Num]
    ) -> list[BytesOfRows]:
        """Return the bytes of rows with each of the lean choices; all data ranks share them out."""
        pp, tp, cp = (formulas.columns[name][index] for name in ("pp", "tp", "cp"))
        shard = {"dp_shard": self._options.world / (pp * tp * cp)}
        choices = [{**shard, **one, **numbers} for one in self._lean_choices()]
        ends = formulas.ends(index, **choices[0])
        return [self._bytes(formulas, index, ends, **one) for one in choices]

    def _held(
        self,
        formulas: VectorizedFormulas,
        index: RowIndex,
        ends: PipelineEnds | None = None,
        **numbers: Num,
    ) -> Array:
        return self._to_fit(self._bytes(formulas, index, ends, **numbers))

    def _bytes(
        self,
        formulas: VectorizedFormulas,
        index: RowIndex,
        ends: PipelineEnds | None,
        **numbers: Num,
    ) -> BytesOfRows:
        """Return the bytes of rows: all of them, and those that are counted."""
        found, count = formulas.bytes(index, ends, **numbers), len(index)
        names = counted_terms(found.terms, by_lists=self.request.trainer == OURS)
        counted = sum(found.terms[name] for name in names)
        return broadcast_to_array(found.total, count), broadcast_to_array(counted, count)

    def _to_fit(self, held: BytesOfRows) -> Array:
        """Return what must fit: more of what is not counted where that is asked."""
        (total, counted), factor = held, self.request.uncounted_factor
        return total if factor == 1.0 else counted + factor * (total - counted)

    def _steady(self, table: WorldTable, index: RowIndex) -> Array:
        wanted = partial(self._terms, table.formulas, names=_ROW_TERMS, recompute=0.0)
        return table.steady(index, wanted)

    def _terms(
        self, formulas: VectorizedFormulas, index: RowIndex, names: tuple[str, ...], **numbers: Num
    ) -> Array:
        terms = formulas.seconds(index, **numbers).terms
        found = np.zeros(len(index))
        for name in names:
            found = found + terms[name]
        return found

    def _too_large(self, count: int) -> None:
        if count:
            self.counts.refused[PLAN_FITS_MEMORY.id] += count


def _least_of_rows(values: Array, row: RowIndex, num_rows: int) -> Array:
    """Return the least value of each row, infinite where it has none."""
    found = np.full(num_rows, np.inf)
    np.minimum.at(found, row, values)
    return found


MOST_TABLE_ROWS = 500_000
"""Rows of the tables that are kept at a time: each takes some 400 bytes."""
_NOT_OF_MESHES = (
    *("devices", "offload", "zero", "schedule", "virtual", "recompute", "reshard"),
    *("secondary", "gather", "int8_block", "reduce"),
)
"""Pins that no row of a table depends on."""

_Pinned = tuple[tuple[str, tuple[int | str, ...]], ...]
BytesOfRows = tuple[Array, Array]
"""The bytes of rows: all of them, and those that are counted."""


class WorldTable:
    """Hold the legal meshes of so many ranks as rows, and what is known of each row."""

    def __init__(self, rows: LegalMeshes, formulas: VectorizedFormulas) -> None:
        """Begin with nothing known."""
        self.rows, self.formulas = rows, formulas
        self._options: dict[object, OptionTables] = {}
        self._steady = np.full(len(rows), np.nan)
        self._held: dict[object, Array] = {}

    def options(self, request: SearchRequest, *, offload: bool) -> OptionTables:
        """Return what the rows leave open under the pins of a request."""
        name = offload, _sorted(request.pins.values), _sorted(request.pins.limits)
        if name not in self._options:
            self._options[name] = OptionTables(request, offload=offload)
            self._options[name].set_meshes(self.rows)
        return self._options[name]

    def steady(self, index: RowIndex, compute: Callable[[RowIndex], Array]) -> Array:
        """Return the seconds that no choice takes from rows; `compute` gives those of new ones."""
        new = index[np.isnan(self._steady[index])]
        if len(new):
            self.formulas.prepare(new)
            self._steady[new] = compute(new)
        return self._steady[index]

    def held(
        self,
        name: object,
        count: int,
        index: RowIndex,
        compute: Callable[[RowIndex], Sequence[BytesOfRows]],
    ) -> list[BytesOfRows]:
        """Return the bytes of rows with `count` choices that have some name together.

        They are kept where somebody asks for all rows: of most worlds a few are fast enough.
        """
        if name not in self._held:
            if len(index) < len(self.rows):
                return list(compute(index))
            self._held[name] = np.full((count, 2, len(self.rows)), np.nan)
        known = self._held[name]
        new = index[np.isnan(known[0, 0, index])]
        if len(new):
            for place, (total, counted) in enumerate(compute(new)):
                known[place, 0, new], known[place, 1, new] = total, counted
        return [(known[place, 0, index], known[place, 1, index]) for place in range(count)]


@dataclass(frozen=True, slots=True)
class _Question:
    """Hold all that a table depends on; what else a request says is not looked at."""

    world: int
    mathematics: Mathematics
    pins: tuple[_Pinned, _Pinned]
    machine: MachineNumbers
    software: TrainerConstants
    trainer: str
    sums: float
    request: SearchRequest = field(compare=False, repr=False)


def world_table(request: SearchRequest, world: int) -> WorldTable:
    """Return the table of `world` ranks of a request: the same for all that differ in nothing else.

    How much memory a device has changes no seconds, nor how many ranks the slowest links reach.
    """
    machine = request.machine_numbers(world)
    *near, far = machine.tiers
    question = _Question(
        world=world,
        mathematics=request.mathematics,
        pins=(_pinned(request.pins.values), _pinned(request.pins.limits)),
        machine=replace(machine, memory_bytes=0.0, tiers=(*near, replace(far, degree=0.0))),
        software=request.software,
        trainer=request.trainer,
        sums=searched_sums(request),
        request=request,
    )
    return _TABLES.get(question)


def _pinned(values: Mapping[str, tuple[int | str, ...]]) -> _Pinned:
    return tuple(item for item in _sorted(values) if item[0] not in _NOT_OF_MESHES)


def _sorted(values: Mapping[str, tuple[int | str, ...]]) -> _Pinned:
    return tuple(sorted(values.items()))


class _Tables:
    """The tables that were asked for last, together of no more than so many rows."""

    def __init__(self, most_rows: int) -> None:
        self._most = most_rows
        self._known: OrderedDict[_Question, WorldTable] = OrderedDict()

    def get(self, question: _Question) -> WorldTable:
        """Return the answer to a question; the oldest ones go where there are too many rows."""
        if question not in self._known:
            request = question.request
            rows = legal_meshes(request, question.world, _legality(request.one_rank_run))
            self._known[question] = WorldTable(rows, VectorizedFormulas(request, rows))
        self._known.move_to_end(question)
        found = self._known[question]
        kept = sum(len(one.rows) for one in self._known.values())
        while kept > self._most and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            kept -= len(oldest.rows)
        return found


_TABLES = _Tables(MOST_TABLE_ROWS)


@lru_cache(maxsize=4)
def _legality(plan: Plan) -> Legality:
    return Legality(plan)
