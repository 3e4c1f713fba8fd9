"""Keys and values over N ranks: 320/N GiB, and 0.5 GiB of a layer on each of eight."""

from __future__ import annotations

import pytest

from echelon.core.units import GIB
from echelon.page.lessons.key_slices import KEY_HEADS, SQUARE, TABLED, held, key_slices
from echelon.page.lessons.lesson import DiagramFigure, Frame, Tile
from echelon.page.lessons.ring_attention import CASES, RingRecord
from echelon.page.lessons.traces import read_trace
from echelon.planner.view.document import BarsFigure
from tests.page.lessons.reading import facts, figure, holds


@pytest.mark.system("S58", "F11")
def test_a_rank_of_eight_holds_40_gib_and_half_a_gib_of_a_layer() -> None:
    frames = key_slices().scene(ranks="8").frames
    assert len(frames) == 5
    claimed = holds("llm-training-56")
    assert held(8, 64) / GIB == claimed["per_gpu_all_layers"] == 40
    assert held(8, 64, layers=1) / GIB == claimed["per_gpu_per_layer"] == 0.5
    last = facts(frames[-1])
    assert last == {"a rank, all layers": "40.00 GiB", "a rank, one layer": "512.00 MiB"}
    assert "320/N GiB" in frames[-1].caption


@pytest.mark.system("F11")
def test_it_is_320_over_n_for_every_n() -> None:
    claimed = holds("llm-training-55")
    assert held(1, 64) / GIB == claimed["total_GiB"] == 320
    assert held(1, 64, layers=1) / GIB == claimed["per_layer_GiB"] == 4
    assert held(1, 8) / GIB == claimed["with_8_of_64_kv_heads_GiB"] == 40
    for keys, heads in KEY_HEADS.items():
        bars = figure(key_slices().scene(keys=keys).frames[-1], BarsFigure)
        whole = 320 * heads / 64
        assert [row.total / GIB for row in bars.rows] == [whole / n for n in TABLED]
        assert [row.over for row in bars.rows] == [row.total > bars.limit for row in bars.rows]


@pytest.mark.system("F11")
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_layers_are_cut_across_and_positions_down(ranks: int) -> None:
    whole, by_layers, by_positions, exchange, _ = key_slices().scene(ranks=str(ranks)).frames
    assert [_box(tile) for tile in _tiles(whole)] == [(0, 0, SQUARE, SQUARE)]
    part = SQUARE // ranks
    assert [_box(tile) for tile in _tiles(by_layers)] == [
        (rank * part, 0, part, SQUARE) for rank in range(ranks)
    ]
    assert [_box(tile) for tile in _tiles(by_positions)] == [
        (0, rank * part, SQUARE, part) for rank in range(ranks)
    ]
    # The same amount for each rank, either way.
    assert facts(by_layers)["a pipeline rank holds"] == facts(by_positions)["a context rank holds"]
    moves = figure(exchange, DiagramFigure).moves
    assert len({move.source for move in moves}) == len({move.target for move in moves}) == ranks
    # They go the way that ranks recorded: to the rank before.
    case = RingRecord.read(read_trace("ring")["cases"][CASES[0]])
    assert all(target == (source - 1) % 4 for source, target, _, _ in case.messages(1))
    ends = [(int(move.source.split()[1]), int(move.target.split()[1])) for move in moves]
    assert all(target == (source - 1) % ranks for source, target in ends)
    assert facts(exchange)["rotations in each layer"] == str(ranks - 1)


def _tiles(frame: Frame) -> list[Tile]:
    diagram = figure(frame, DiagramFigure)
    return [tile for place in diagram.places for tile in place.tiles]


def _box(tile: Tile) -> tuple[int, int, int, int]:
    return tile.row, tile.column, tile.rows, tile.columns
