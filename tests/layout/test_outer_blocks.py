"""Blocks of outer gradients: counted by hand, and as many for a stage however it is cut."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.choices.local_sgd import OUTER_BLOCK
from echelon.layout.outer_blocks import (
    _scales_of_range,
    blocks_between,
    blocks_in_stage,
    sent_of_slices,
)
from tests.layout.test_islands import islands


def test_columns_lie_in_blocks_of_a_row() -> None:
    assert OUTER_BLOCK == 128
    assert [blocks_between(0, n) for n in (0, 1, 128, 129, 300)] == [0, 1, 1, 2, 3]
    assert blocks_between(100, 300) == 3


def test_scales_of_a_range_of_rows() -> None:
    # Rows of 200: two blocks each. Elements 150 to 649: the end of row 0 (one block), rows 1 and 2,
    # and 50 of row 3 (one block).
    assert _scales_of_range(0, 200, 150, 650) == 1 + 2 * 2 + 1
    # The second half of rows of 200, columns 100 to 199, meets both blocks in each row.
    assert _scales_of_range(100, 100, 0, 300) == 3 * 2
    assert _scales_of_range(100, 100, 10, 20) == 1


def test_a_stage_has_the_same_blocks_however_it_is_cut() -> None:
    whole = blocks_in_stage(islands(), 0, 0)
    assert (
        whole == blocks_in_stage(islands(tp=2), 3, 0) == blocks_in_stage(islands(dp_shard=2), 1, 0)
    )
    codes = sum(n for n, _ in sent_of_slices(islands(), 0, 0))
    cut = islands(dp_shard=2)
    cut = replace(cut, layout=replace(cut.layout, zero=replace(cut.layout.zero, stage=1)))
    halves = [sum(n for n, _ in sent_of_slices(cut, rank, 0)) for rank in range(2)]
    assert sum(halves) == codes
