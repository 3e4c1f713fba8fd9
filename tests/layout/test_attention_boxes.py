"""Boxes: cut, trimmed and joined into fewer, with the same pairs."""

from __future__ import annotations

import pytest

from echelon.core.attention_mask import Band
from echelon.layout.attention_boxes import (
    CAUSAL,
    FULL,
    AttentionTile,
    join_boxes,
    kernel_form,
    tile_box,
)


def box(rows: tuple[int, int], columns: tuple[int, int], band: Band = FULL) -> AttentionTile:
    return AttentionTile(slice(*rows), slice(*columns), band)


def pairs(*boxes: AttentionTile) -> list[tuple[int, int]]:
    """Return the rows and columns that meet, each as often as it is in a box."""
    return sorted(
        (one.q.start + i, one.k.start + j)
        for one in boxes
        for i in range(one.num_queries)
        for j in range(one.num_keys)
        if one.band.allows(i, j)
    )


@pytest.mark.parametrize(
    ("band", "shape", "form"),
    [
        (Band(None, None), (3, 5), "full"),
        (Band(-4, None), (3, 5), "full"),
        (Band(0, None), (3, 5), "causal"),
        (Band(0, 2), (3, 5), "causal"),
        (Band(0, 1), (3, 5), "banded"),
        (Band(1, None), (3, 5), "banded"),
    ],
)
def test_the_form_is_the_simplest_that_a_band_has(
    band: Band, shape: tuple[int, int], form: str
) -> None:
    assert kernel_form(band, *shape) == form


def test_rows_and_columns_count_from_the_first() -> None:
    whole = box((10, 16), (20, 26), CAUSAL)
    lower = whole.rows(2, 5)
    assert (lower.q, lower.k, lower.band) == (slice(12, 15), slice(20, 26), Band(-2, None))
    right = whole.columns(2, 5)
    assert (right.q, right.k, right.band) == (slice(10, 16), slice(22, 25), Band(2, None))
    assert pairs(whole) == sorted(pairs(whole.rows(0, 2)) + pairs(whole.rows(2, 6)))


def test_a_trimmed_box_has_no_row_or_column_that_sees_nothing() -> None:
    trimmed = box((0, 6), (0, 6), Band(2, None)).trimmed()
    assert trimmed is not None
    assert (trimmed.q, trimmed.k, trimmed.form) == (slice(2, 6), slice(0, 4), "causal")
    assert box((0, 3), (0, 3), Band(3, None)).trimmed() is None
    assert box((0, 3), (0, 3), Band(2, 1)).trimmed() is None


@pytest.mark.parametrize(
    "band", [FULL, CAUSAL, Band(-2, None), Band(3, None), Band(0, 2), Band(-3, 1), Band(None, 4)]
)
def test_tiles_have_the_pairs_of_the_box(band: Band, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.layout.attention_boxes.MIN_MIDDLE_TILES", 1)
    whole = box((4, 15), (1, 10), band)
    assert pairs(*join_boxes(tile_box(whole, 2))) == pairs(whole)


def test_full_boxes_join_where_they_adjoin() -> None:
    assert join_boxes([box((0, 4), (4, 8)), box((0, 4), (0, 4))]) == [box((0, 4), (0, 8))]
    assert join_boxes([box((4, 8), (0, 4)), box((0, 4), (0, 4))]) == [box((0, 8), (0, 4))]
    apart = [box((0, 4), (0, 4)), box((0, 4), (5, 8))]
    assert join_boxes(apart) == apart


def test_causal_squares_along_the_diagonal_join_over_the_full_box_between() -> None:
    squares = [box((0, 4), (0, 4), CAUSAL), box((4, 8), (4, 8), CAUSAL)]
    assert join_boxes([*squares, box((4, 8), (0, 4))]) == [box((0, 8), (0, 8), CAUSAL)]
    # Of a wider full box the rest remains.
    wide = join_boxes(
        [box((0, 4), (2, 6), CAUSAL), box((4, 8), (6, 10), CAUSAL), box((4, 8), (0, 6))]
    )
    assert wide == [box((0, 8), (2, 10), CAUSAL), box((4, 8), (0, 2))]
    assert join_boxes(squares) == squares


def test_a_piece_covers_everything_of_all_sequences_or_not() -> None:
    assert box((0, 3), (0, 5)).covers(3, 5)
    assert not box((0, 3), (0, 4)).covers(3, 5)
    alone = AttentionTile(slice(0, 3), slice(0, 5), FULL, sequence=1)
    assert not alone.covers(3, 5)
    assert alone.sequences == slice(1, 2)


def test_parts_of_a_tile_are_of_its_sequence() -> None:
    tile = AttentionTile(slice(0, 4), slice(0, 4), Band(None, 0), 1)
    assert (tile.rows(0, 2).sequence, tile.columns(1, 3).sequence) == (1, 1)
    assert (trimmed := tile.rows(0, 2).trimmed()) is not None
    assert trimmed.sequence == 1
