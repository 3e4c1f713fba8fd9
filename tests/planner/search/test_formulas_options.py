"""Every way to share out of a row meets every order of the same row, and of no other."""

from __future__ import annotations

from itertools import product

import numpy as np

from echelon.planner.search.formulas import OptionTables
from echelon.planner.search.legal_meshes import Legality, legal_meshes
from echelon.planner.search.options import pinned_zero_options, schedule_options
from tests.planner.requests import small


def test_pairs_are_the_product_of_the_options_of_each_row() -> None:
    request = small()
    meshes = legal_meshes(request, 8, Legality(request.one_rank_run))
    tables = OptionTables(request, offload=False)
    tables.set_meshes(meshes)
    rows = np.arange(0, len(meshes), 5, dtype=np.int64)
    shares, orders = tables.zero_options(rows), tables.schedule_options(rows)
    share, order = tables.pairs(len(rows), shares, orders)
    assert (shares.row[share] == orders.row[order]).all()
    found = {(int(a), int(b)) for a, b in zip(share, order, strict=True)}
    wanted = {
        (int(a), int(b))
        for row in range(len(rows))
        for a, b in product(np.flatnonzero(shares.row == row), np.flatnonzero(orders.row == row))
    }
    assert found == wanted
    assert len(share) == len(found)
    assert len(found) * len(tables.recomputes) == int(tables.num_plans()[rows].sum())


def test_options_of_a_row_are_those_of_its_mesh() -> None:
    request = small()
    meshes = legal_meshes(request, 8, Legality(request.one_rank_run))
    tables = OptionTables(request, offload=False)
    tables.set_meshes(meshes)
    row = {name: int(column[3]) for name, column in meshes.columns.items()}
    only = np.array([3], dtype=np.int64)
    shares, orders = tables.zero_options(only), tables.schedule_options(only)
    key = (row["dp"], row["cp"], row["ep"], row["cp"] * row["tp"])
    wanted = pinned_zero_options(request.pins, key, offload=False)
    assert [shares.option_at(place) for place in range(len(shares.row))] == [*wanted]
    fitting = [
        one
        for one in schedule_options(request.pins, row["pp"], request.model.layers)
        if one.allows(row["microbatches"])
    ]
    assert [orders.option_at(place) for place in range(len(orders.row))] == fitting
