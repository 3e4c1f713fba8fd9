"""Shapes and bytes of a matrix [4096, 16384] that is cut over tensor ranks."""

from __future__ import annotations

import pytest

from echelon.core.units import decimal_bytes
from echelon.cost.bytes.terms import all_gather_bytes, all_reduce_bytes
from echelon.page.lessons.tensor.splits import COLUMNS, ROWS, TOKENS, cut_of, matrix_splits
from tests.page.lessons.shown import facts, tiles


@pytest.mark.system("S58")
def test_shapes_are_those_of_the_guides() -> None:
    # Two ranks: [4096, 8192] each; four: [4096, 4096].
    assert cut_of(COLUMNS, 2).part == (4096, 8192)
    assert cut_of(COLUMNS, 4).part == (4096, 4096)
    assert cut_of(ROWS, 2).part == (2048, 16384)
    drawn = tiles(matrix_splits().scene(cut=COLUMNS, ranks="2").frames[1])
    assert [drawn[f"a{rank}"].label for rank in range(2)] == ["[4096, 8192]"] * 2


@pytest.mark.parametrize("degree", [2, 4])
def test_each_cut_has_its_collective_with_the_bytes_of_its_formula(degree: int) -> None:
    whole = TOKENS * 16384 * 2
    by_columns = matrix_splits().scene(cut=COLUMNS, ranks=str(degree))
    by_rows = matrix_splits().scene(cut=ROWS, ranks=str(degree))
    gather = decimal_bytes(all_gather_bytes(whole // degree, degree))
    total = decimal_bytes(all_reduce_bytes(whole, degree))
    assert facts(by_columns.frames[-1])["a rank sends"] == gather
    assert facts(by_rows.frames[-1])["a rank sends"] == total
    assert by_rows.table is not None
    assert [row[-2:] for row in by_rows.table.rows] == [
        ("all-gather", gather),
        ("all-reduce", total),
    ]


def test_only_summands_are_drawn_as_parts() -> None:
    for by, state in ((COLUMNS, "whole"), (ROWS, "part")):
        computed = tiles(matrix_splits().scene(cut=by, ranks="2").frames[2])
        assert {computed[f"y{rank}-{rank}"].state for rank in range(2)} == {state}
