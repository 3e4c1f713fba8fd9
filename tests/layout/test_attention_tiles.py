"""Pieces against brute force over positions, and how few there are."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.attention_mask import (
    AttentionMask,
    Band,
    DocumentStarts,
    Placement,
    PlacementKind,
    PositionRun,
)
from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.layout import attention_tiles as boxes
from echelon.layout.attention_tiles import (
    CAUSAL,
    FULL,
    AttentionTile,
    join_boxes,
    kernel_form,
    tile_box,
    tiles_between,
)
from tests.walks import examples

CAUSAL_MASK = AttentionMask()
FULL_MASK = AttentionMask(causal=False)


def _positions(runs: tuple[PositionRun, ...]) -> list[int]:
    return [run.position(i) for run in runs for i in range(run.count)]


def _document(starts: tuple[int, ...], position: int) -> int:
    return sum(start <= position for start in starts)


def _check(
    queries: tuple[PositionRun, ...],
    keys: tuple[PositionRun, ...],
    mask: AttentionMask,
    documents: DocumentStarts | None,
    least_rows: int = TRAINING_PIECES.tile_rows,
) -> tuple[AttentionTile, ...]:
    """Assert that each visible pair is in one piece, and that no row of a piece is empty."""
    pieces = tiles_between(queries, keys, mask, documents, least_rows)
    sequences = range(len(documents)) if documents else range(2)
    met: Counter[tuple[int, int, int]] = Counter()
    for piece in pieces:
        seen = [
            (i, j)
            for i in range(piece.num_queries)
            for j in range(piece.num_keys)
            if piece.band.allows(i, j)
        ]
        assert {i for i, _ in seen} == set(range(piece.num_queries))
        assert (piece.form == "full") == (len(seen) == piece.num_queries * piece.num_keys)
        causal = [(i, j) for i in range(piece.num_queries) for j in range(piece.num_keys) if j <= i]
        assert piece.form != "causal" or seen == causal
        for b in sequences if piece.sequence is None else (piece.sequence,):
            met.update((b, piece.q.start + i, piece.k.start + j) for i, j in seen)
    expected = {
        (b, i, j)
        for b in sequences
        for i, p in enumerate(_positions(queries))
        for j, k in enumerate(_positions(keys))
        if mask.allows(p, k)
        and (documents is None or _document(documents[b], p) == _document(documents[b], k))
    }
    assert set(met) == expected
    assert set(met.values()) <= {1}
    return pieces


MASKS = st.builds(
    AttentionMask, causal=st.booleans(), window=st.one_of(st.none(), st.integers(1, 30))
)
STARTS = st.sets(st.integers(1, 47), max_size=8).map(lambda rest: (0, *sorted(rest)))
DOCUMENTS = st.one_of(st.none(), st.lists(STARTS, min_size=1, max_size=3).map(tuple))
PLACEMENTS = st.builds(
    Placement,
    kind=st.sampled_from(["contiguous", "zigzag", "striped"]),
    ring_degree=st.sampled_from([1, 2, 4]),
    ulysses_degree=st.sampled_from([1, 2]),
    length=st.sampled_from([16, 48]),
)


@settings(max_examples=examples(150))
@given(placement=PLACEMENTS, mask=MASKS, documents=DOCUMENTS, data=st.data())
def test_each_visible_pair_is_in_one_piece(
    placement: Placement, mask: AttentionMask, documents: DocumentStarts | None, data: st.DataObject
) -> None:
    ranks = st.integers(0, placement.degree - 1)
    queries, keys = (placement.runs(data.draw(ranks)) for _ in range(2))
    if data.draw(st.booleans()):
        # Gathered keys lie in the order of the ranks.
        keys = tuple(run for rank in range(placement.degree) for run in placement.runs(rank))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "MIN_MIDDLE_TILES", data.draw(st.integers(1, 3)))
        tiles_between.cache_clear()
        least_rows = data.draw(st.sampled_from([2, 3, 192]))
        _check(queries, keys, mask, documents, least_rows)
        tiles_between.cache_clear()


@settings(max_examples=examples(80))
@given(
    runs=st.permutations([PositionRun(s, 1, 6) for s in range(0, 36, 6)]),
    mask=MASKS,
    data=st.data(),
)
def test_runs_in_any_order_are_met(
    runs: list[PositionRun], mask: AttentionMask, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, 5))
    _check(tuple(runs[:cut]), tuple(runs), mask, data.draw(DOCUMENTS))


def _zigzag(rank: int, degree: int = 4, length: int = 64) -> tuple[PositionRun, ...]:
    return Placement(kind="zigzag", ring_degree=degree, ulysses_degree=1, length=length).runs(rank)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("other", range(4))
def test_a_step_of_a_zigzag_ring_is_one_kernel(place: int, other: int) -> None:
    (piece,) = _check(_zigzag(place), _zigzag(other), CAUSAL_MASK, None)
    rows, half = slice(0, 16), slice(0, 8)
    if place == other:
        assert (piece.q, piece.k, piece.band) == (rows, rows, Band(0, None))
    elif other < place:
        assert (piece.q, piece.k, piece.band) == (rows, half, Band(None, None))
    else:
        assert (piece.q, piece.k, piece.band) == (slice(8, 16), rows, Band(None, None))


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("other", range(4))
def test_without_a_mask_a_step_is_one_full_piece(
    kind: PlacementKind, place: int, other: int
) -> None:
    placement = Placement(kind=kind, ring_degree=4, ulysses_degree=1, length=64)
    (piece,) = _check(placement.runs(place), placement.runs(other), FULL_MASK, None)
    assert piece.form == "full"
    assert piece.covers(16, 16)


@pytest.mark.parametrize("place", range(4))
def test_a_step_of_a_striped_ring_is_one_causal_piece(place: int) -> None:
    placement = Placement(kind="striped", ring_degree=4, ulysses_degree=1, length=64)
    for other in range(4):
        (piece,) = _check(placement.runs(place), placement.runs(other), CAUSAL_MASK, None)
        assert piece.form == "causal"
        later = other > place
        assert (piece.q, piece.k) == (slice(int(later), 16), slice(0, 16 - later))


@pytest.mark.parametrize("place", range(4))
def test_keys_gathered_in_the_order_of_ranks_take_one_piece_a_rank_or_so(place: int) -> None:
    keys = tuple(run for rank in range(4) for run in _zigzag(rank))
    pieces = _check(_zigzag(place), keys, CAUSAL_MASK, None)
    assert len(pieces) <= 5
    assert sum(piece.form == "causal" for piece in pieces) == 1


def test_chunks_of_one_ulysses_group_are_one_run() -> None:
    placement = Placement(kind="zigzag", ring_degree=1, ulysses_degree=4, length=64)
    runs = tuple(run for rank in range(4) for run in placement.runs(rank))
    (piece,) = _check(runs, runs, CAUSAL_MASK, None)
    assert piece.form == "causal"
    assert piece.covers(64, 64)


def test_one_document_is_no_document() -> None:
    runs = _zigzag(1)
    assert tiles_between(runs, runs, CAUSAL_MASK, ((0,), (0,))) == tiles_between(
        runs, runs, CAUSAL_MASK, None
    )


def test_each_document_is_one_piece_and_equal_sequences_share_them() -> None:
    runs = (PositionRun(0, 1, 32),)
    shared = _check(runs, runs, CAUSAL_MASK, ((0, 5, 19), (0, 5, 19)))
    assert [piece.sequence for piece in shared] == [None] * 3
    assert all(piece.form == "causal" for piece in shared)
    apart = _check(runs, runs, CAUSAL_MASK, ((0, 5, 19), (0, 9)))
    assert Counter(piece.sequence for piece in apart) == {0: 3, 1: 2}


def test_a_document_over_both_zigzag_chunks_of_a_rank_is_one_causal_piece() -> None:
    runs = (PositionRun(0, 1, 8), PositionRun(56, 1, 8))
    (piece,) = _check(runs, runs, CAUSAL_MASK, ((0,),))
    assert piece.form == "causal"
    pieces = _check(runs, runs, CAUSAL_MASK, ((0, 4, 60),))
    assert [(p.q, p.form == "causal") for p in pieces] == [
        (slice(4, 12), True),
        (slice(0, 4), True),
        (slice(12, 16), True),
    ]


@pytest.mark.parametrize(("length", "window"), [(2048, 64), (4096, 1024), (4096, 4000)])
def test_a_window_takes_three_pieces_a_tile(length: int, window: int) -> None:
    run = (PositionRun(0, 1, length),)
    mask = AttentionMask(window=window)
    pieces = tiles_between(run, run, mask, None)
    tile = max(TRAINING_PIECES.tile_rows, window // boxes.TILES_PER_WINDOW)
    assert len(pieces) <= 3 * -(-length // tile)
    computed = sum(
        p.num_queries * (p.num_queries + 1 if p.form == "causal" else 2 * p.num_keys) // 2
        for p in pieces
    )
    seen = sum(p.band.num_pairs(p.num_queries, p.num_keys) for p in pieces)
    assert seen == mask.num_pairs(length)
    assert computed <= seen + length * tile


def test_a_window_shorter_than_a_chunk_needs_only_the_end_of_the_chunk_before() -> None:
    (piece,) = _check(
        (PositionRun(64, 1, 64),), (PositionRun(0, 1, 64),), AttentionMask(window=9), None
    )
    assert (piece.q, piece.k) == (slice(0, 8), slice(56, 64))
    assert not tiles_between(
        (PositionRun(128, 1, 64),), (PositionRun(0, 1, 64),), AttentionMask(window=9), None
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
    monkeypatch.setattr("echelon.layout.attention_tiles.MIN_MIDDLE_TILES", 1)
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
