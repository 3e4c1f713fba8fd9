"""Rows with every way to share out and every order, as arrays: what a sweep computes with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from echelon.cost.lattice.numbers import Array
from echelon.planner.choices import Order, Shares, orders_of, pinned_shares, recomputes_of
from echelon.planner.formulas import Index
from echelon.planner.lattice import Columns, Rows, fold_of
from echelon.planner.request import Request
from echelon.planner.trainers import ABILITIES

Kind = TypeVar("Kind", Shares, Order)
SHARE_NUMBERS = ("zero", "dp_replicate", "dp_shard", "reshard", "offload")
ORDER_NUMBERS = ("schedule", "virtual")


@dataclass(slots=True)
class Table(Generic[Kind]):
    """Hold the choices of some rows one after the other: `row` says whose each is."""

    row: Index
    kinds: Sequence[Kind]
    kind: Index
    numbers: dict[str, Array]
    fits: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))

    def of(self, place: int) -> Kind:
        """Return the choice that stands at a place."""
        return self.kinds[int(self.kind[place])]


class Expanded:
    """Give the choices of the rows of one world size."""

    def __init__(self, request: Request, *, offload: bool) -> None:
        """Make the lists that are the same for all rows."""
        pins = request.pins
        self._request = request
        self._offload = offload or pins.of("offload") == (1,)
        self.recomputes = recomputes_of(pins, request.model.layers)
        self.columns: Columns = {}
        self.world = 0

    @property
    def offloads(self) -> float:
        """Return 1 where optimizer state rests in the memory of hosts."""
        return float(self._offload)

    @property
    def recompute_ends(self) -> tuple[float, float]:
        """Return the least and the largest share of blocks that run forward again."""
        return self.recomputes[0][1], self.recomputes[-1][1]

    def of(self, rows: Rows) -> None:
        """Make the lists of these rows, each once for all rows that share it."""
        self.columns = columns = rows.columns
        self.world = rows.world
        inner = fold_of(columns, np.ones(len(rows), dtype=np.int64))
        keys = [columns["dp"], columns["cp"], columns["ep"], inner]
        pins, layers = self._request.pins, self._request.model.layers
        able = ABILITIES.get(self._request.trainer)
        if able is not None:
            keys += [columns["pp"], columns["tp"]]

        def shares(key: tuple[int, ...]) -> list[Shares]:
            found = pinned_shares(pins, key[:4], offload=self._offload)
            if able is None:
                return [*found]
            pp, tp = key[4:]
            return [one for one in found if able.shares(one, pp > 1, tp > 1, key[1] > 1)]

        def orders(key: tuple[int, ...]) -> list[Order]:
            found = [one for one in orders_of(pins, key[0], layers) if one.allows(key[1])]
            return [one for one in found if able is None or able.order(one, *key)]

        self._shares: _Lists[Shares] = _Lists(keys, shares, SHARE_NUMBERS)
        self._orders: _Lists[Order] = _Lists(
            (columns["pp"], columns["microbatches"]), orders, ORDER_NUMBERS
        )

    def num_plans(self) -> NDArray[np.int64]:
        """Return how many plans each row stands for."""
        return self._shares.counts() * self._orders.counts() * len(self.recomputes)

    def shares(self, rows: Index) -> Table[Shares]:
        """Return the ways to share out of some rows."""
        return self._shares.table(rows)

    def orders(self, rows: Index) -> Table[Order]:
        """Return the orders of some rows."""
        return self._orders.table(rows)

    @staticmethod
    def pairs(num_rows: int, shares: Table[Shares], orders: Table[Order]) -> tuple[Index, Index]:
        """Return every way to share out of a row with every order of the same row."""
        per_share = np.bincount(shares.row, minlength=num_rows)
        per_order = np.bincount(orders.row, minlength=num_rows)
        each = per_share * per_order
        row = np.repeat(np.arange(num_rows), each)
        place = np.arange(int(each.sum())) - np.repeat(np.cumsum(each) - each, each)
        share = (np.cumsum(per_share) - per_share)[row] + place // per_order[row]
        order = (np.cumsum(per_order) - per_order)[row] + place % per_order[row]
        return share, order


class _Lists(Generic[Kind]):
    """Hold the list of choices of each row; rows with the same key share one."""

    def __init__(
        self,
        keys: Sequence[NDArray[np.int64]],
        make: Callable[[tuple[int, ...]], Sequence[Kind]],
        names: Sequence[str],
    ) -> None:
        joined = np.zeros(len(keys[0]), dtype=np.int64)
        for key in keys:
            joined = joined * (int(key.max(initial=0)) + 1) + key
        _, first, self._which = np.unique(joined, return_index=True, return_inverse=True)
        self._names = names
        self._kinds: list[Kind] = []
        starts = [0]
        for place in first:
            self._kinds.extend(make(tuple(int(key[place]) for key in keys)))
            starts.append(len(self._kinds))
        self._start = np.array(starts[:-1], dtype=np.int64)
        self._count = np.diff(np.array(starts, dtype=np.int64))
        self._numbers: dict[str, Array] = {
            name: np.array([getattr(kind, name) for kind in self._kinds], dtype=float)
            for name in names
        }

    def counts(self) -> NDArray[np.int64]:
        """Return how many choices each row has."""
        return self._count[self._which]

    def table(self, rows: Index) -> Table[Kind]:
        """Return the choices of some rows."""
        which = self._which[rows]
        count = self._count[which]
        row = np.repeat(np.arange(len(rows)), count)
        place = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        kind = self._start[which][row] + place
        numbers = {name: self._numbers[name][kind] for name in self._names}
        return Table(row=row, kinds=self._kinds, kind=kind, numbers=numbers)
