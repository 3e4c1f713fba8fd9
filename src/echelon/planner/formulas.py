"""The formulas of `cost/lattice/` over the rows of a search, blocks once for each shard.

What a block takes depends on a mesh and its microbatch only up to what pipeline and data ranks
make of it, so thousands of rows share a few hundred blocks.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from echelon.cost.lattice.block import Work
from echelon.cost.lattice.numbers import Array, LayoutNumbers, Num
from echelon.cost.lattice.of_cluster import machine_numbers
from echelon.cost.lattice.of_model import model_numbers
from echelon.cost.lattice.step import Blocks, blocks_of, step_seconds
from echelon.cost.lattice.terms import Terms
from echelon.planner.closed_bytes import closed_bytes
from echelon.planner.lattice import Rows, Whole
from echelon.planner.pins import CONTEXT_KINDS
from echelon.planner.request import Request

Record = TypeVar("Record")
Index = NDArray[np.int64]

_OF_BLOCKS = (
    "tp",
    "cp",
    "ep",
    "expert_tp",
    "sequence_parallel",
    "ulysses",
    "gathered",
    "microbatch",
)


class Formulas:
    """Give seconds and bytes of rows of a search, with what else a plan needs as arrays."""

    def __init__(self, request: Request, rows: Rows) -> None:
        """Keep the rows as the numbers that the formulas read."""
        self._request = request
        found = rows.columns
        names = (*_OF_BLOCKS[:-2], "pp", "microbatch", "microbatches")
        self.columns: dict[str, Array] = {name: found[name].astype(float) for name in names}
        gathered = found["kind"] == CONTEXT_KINDS.index("gathered")
        self.columns["gathered"] = gathered.astype(float)
        self._machine = machine_numbers(
            request.cluster, request.mathematics.precision.parameters, ranks=rows.world
        )
        self._shard = _numbered(found)
        self._blocks: Blocks | None = None
        self._known: Index = np.full(len(rows), -1, dtype=np.int64)

    def prepare(self, index: Index) -> None:
        """Compute the blocks of these rows, once for all that share them."""
        _, first, which = np.unique(self._shard[index], return_index=True, return_inverse=True)
        alike = {name: self.columns[name][index[first]] for name in _OF_BLOCKS}
        self._blocks = blocks_of(self._work(LayoutNumbers(**alike)))
        self._known[index] = which

    def seconds(self, index: Index, **rest: Num) -> Terms:
        """Return the seconds of prepared rows at `index`; `rest` are fields of LayoutNumbers."""
        assert self._blocks is not None
        return step_seconds(self._at(index, rest), picked(self._blocks, self._known[index]))

    def bytes(self, index: Index, **rest: Num) -> Terms:
        """Return the bytes of rows at `index`; `rest` are fields of LayoutNumbers."""
        return closed_bytes(self._at(index, rest), self._request.trainer)

    def work(self, index: Index, **rest: Num) -> Work:
        """Return what the formulas read of rows at `index`."""
        return self._at(index, rest)

    def _at(self, index: Index, rest: dict[str, Num]) -> Work:
        layout: dict[str, Any] = {name: column[index] for name, column in self.columns.items()}
        return self._work(LayoutNumbers(**layout | rest))

    def _work(self, layout: LayoutNumbers) -> Work:
        request = self._request
        length = request.mathematics.sequence_length
        return Work(
            model=model_numbers(request.model, length, tp=layout.tp),
            machine=self._machine,
            software=request.software,
            layout=layout,
        )


def picked(record: Record, index: Index) -> Record:
    """Return a record of records with every array in it replaced by its entries at `index`."""
    done: dict[int, Any] = {}
    changed: dict[str, Any] = {}
    for item in fields(record):  # type: ignore[arg-type]
        value: Any = getattr(record, item.name)
        if id(value) in done:
            changed[item.name] = done[id(value)]
        elif hasattr(value, "__dataclass_fields__"):
            changed[item.name] = done[id(value)] = picked(value, index)
        elif np.ndim(value):
            changed[item.name] = done[id(value)] = value[index]
    return replace(record, **changed)  # type: ignore[type-var]


def whole(value: Num, count: int) -> Array:
    """Return a quantity as an array of `count` numbers, also where it is the same for all."""
    return np.broadcast_to(np.asarray(value, dtype=float), (count,))


def _numbered(columns: dict[str, Whole]) -> Index:
    """Return a number for each row that is the same for rows with the same blocks."""
    most = int(columns["microbatch"].max(initial=0)) + 1
    return columns["split"] * most + columns["microbatch"]
