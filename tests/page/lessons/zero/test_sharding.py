"""Copies store 28B of a 7B model on four ranks, shards store 7B."""

from __future__ import annotations

import pytest

from echelon.page.lessons.lesson import DiagramFigure
from echelon.page.lessons.zero import SHARDING_WEIGHTS as WEIGHTS
from echelon.page.lessons.zero import parameters_of_rank, sharding
from tests.page.lessons.reading import facts, figure, holds


@pytest.mark.system("S58")
def test_copies_store_28b_and_shards_7b() -> None:
    copied, sharded, gathered, freed = sharding().scene(ranks="4").frames
    assert facts(copied) == {"all ranks store": "28.00B", "stored again": "21.00B"}
    assert copied.facts[1].note == "3 x the model"
    assert facts(sharded) == {"all ranks store": "7.00B", "stored again": "0"}
    claimed = holds("llm-training-16")
    assert 4 * parameters_of_rank(4, 0) / 1e9 == claimed["total_B"] == 28
    assert claimed["redundant_B"] == 21
    assert parameters_of_rank(4, 3) / 1e9 == holds("llm-training-17") == 1.75
    assert facts(gathered)["one layer, whole"] == "218.75M"
    assert facts(freed) == {"a rank has in memory": "1.75B"}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_part_is_drawn_once_where_it_is_sharded(ranks: int) -> None:
    copied, sharded, gathered, _ = sharding().scene(ranks=str(ranks)).frames
    columns = [
        [(tile.column, tile.columns) for tile in place.tiles]
        for place in figure(copied, DiagramFigure).places
    ]
    assert columns == [[(0, ranks)]] * ranks
    places = figure(sharded, DiagramFigure).places
    assert [place.tiles[0].column for place in places] == list(range(ranks))
    assert all(place.tiles[0].columns == 1 for place in places)
    assert ranks * parameters_of_rank(ranks, 3) == WEIGHTS
    # The layer is whole on each rank while it runs.
    for place in figure(gathered, DiagramFigure).places:
        (layer,) = (tile for tile in place.tiles if tile.kind == 1)
        assert layer.columns == ranks
