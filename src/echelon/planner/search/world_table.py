"""What searches of one run on so many ranks have in common, whatever they look for.

A recommendation walks the same meshes many times: with other memory, with another bar, with
optimizer state on hosts, on larger clusters. Which meshes are legal, what their blocks take, and
the least that their rows take and hold does not change by that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from echelon.core.plan import Mathematics, Plan
from echelon.cost.seconds.inputs import TrainerConstants
from echelon.cost.seconds.numbers import Array, MachineNumbers
from echelon.planner.predict.formulas import RowIndex, VectorizedFormulas, searched_sums
from echelon.planner.search.legal_meshes import Legality, LegalMeshes, legal_meshes
from echelon.planner.search.request import SearchRequest

MOST_TABLES = 12
"""World sizes that are kept: a table of a hundred thousand rows takes some 20 MB."""
_NOT_OF_MESHES = ("devices", "offload", "zero", "schedule", "virtual", "recompute", "reshard")
"""Pins that no row of a table depends on."""

_Pinned = tuple[tuple[str, tuple[int | str, ...]], ...]
BytesOfRows = Callable[[RowIndex], tuple[Array, Array]]
"""What gives the bytes of rows: all of them, and those that are counted."""


class WorldTable:
    """Hold the legal meshes of so many ranks as rows, and what is known of each row."""

    def __init__(self, rows: LegalMeshes, formulas: VectorizedFormulas) -> None:
        """Begin with nothing known."""
        self.rows, self.formulas = rows, formulas
        self._steady = np.full(len(rows), np.nan)
        self._held: dict[object, tuple[Array, Array]] = {}

    def steady(self, index: RowIndex, compute: Callable[[RowIndex], Array]) -> Array:
        """Return the seconds that no choice takes from rows; `compute` gives those of new ones."""
        new = index[np.isnan(self._steady[index])]
        if len(new):
            self.formulas.prepare(new)
            self._steady[new] = compute(new)
        return self._steady[index]

    def held(self, name: object, index: RowIndex, compute: BytesOfRows) -> tuple[Array, Array]:
        """Return the bytes of rows, and those that are counted, with a choice of some name."""
        if name not in self._held:
            self._held[name] = np.full(len(self.rows), np.nan), np.full(len(self.rows), np.nan)
        total, counted = self._held[name]
        new = index[np.isnan(total[index])]
        if len(new):
            total[new], counted[new] = compute(new)
        return total[index], counted[index]


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

    How much memory a device has changes no seconds.
    """
    question = _Question(
        world=world,
        mathematics=request.mathematics,
        pins=(_pinned(request.pins.values), _pinned(request.pins.limits)),
        machine=replace(request.machine_numbers(world), memory_bytes=0.0),
        software=request.software,
        trainer=request.trainer,
        sums=searched_sums(request),
        request=request,
    )
    return _known_table(question)


def _pinned(values: Mapping[str, tuple[int | str, ...]]) -> _Pinned:
    return tuple(sorted(item for item in values.items() if item[0] not in _NOT_OF_MESHES))


@lru_cache(maxsize=MOST_TABLES)
def _known_table(question: _Question) -> WorldTable:
    request = question.request
    rows = legal_meshes(request, question.world, _legality(request.one_rank_run))
    return WorldTable(rows, VectorizedFormulas(request, rows))


@lru_cache(maxsize=4)
def _legality(plan: Plan) -> Legality:
    return Legality(plan)
