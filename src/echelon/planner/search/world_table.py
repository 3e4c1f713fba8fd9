# SPDX-License-Identifier: Apache-2.0
"""What searches of one run on so many ranks have in common, whatever they look for.

A recommendation walks the same meshes many times: with other memory, with another bar, with
optimizer state on hosts, on larger clusters. Which meshes are legal, what their blocks take, and
the least that their rows take and hold does not change by that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from echelon.core.plan import Mathematics, Plan
from echelon.cost.inputs.cost_inputs import TrainerConstants
from echelon.cost.inputs.numbers import Array, MachineNumbers
from echelon.planner.predict.formulas import (
    OptionTables,
    RowIndex,
    VectorizedFormulas,
    searched_sums,
)
from echelon.planner.search.legal_meshes import Legality, LegalMeshes, legal_meshes
from echelon.planner.search.request import SearchRequest

MOST_ROWS = 500_000
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


_TABLES = _Tables(MOST_ROWS)


@lru_cache(maxsize=4)
def _legality(plan: Plan) -> Legality:
    return Legality(plan)
