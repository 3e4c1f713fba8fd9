"""The guide of weights: a matrix of 64 x 2^20 values, and columns that ranks share out."""

from __future__ import annotations

import pytest

from echelon.page.lessons.guides.memory import NEURONS, columns_of_rank, weights_guide
from echelon.page.lessons.lesson import DiagramFigure, FoldsFigure
from tests.page.lessons.reading import facts, figure, holds


@pytest.mark.system("S58")
def test_a_matrix_and_the_mlps_of_a_model_have_the_sizes_of_the_guides() -> None:
    first = weights_guide().scene(ranks="2").frames[0]
    claimed = holds("llm-training-25")
    assert facts(first)["values of the matrix"] == f"{claimed['values']:,}" == "67,108,864"
    assert facts(first)["in 16 bits"] == "134.22 MB"
    assert first.facts[1].note == f"= {claimed['MiB']:.2f} MiB"
    results = {fold.title: fold.result for fold in figure(first, FoldsFigure).folds}
    assert results["All MLPs of 32 blocks"] == f"{holds('llm-training-26')['GiB']:.2f} GiB"
    assert results["One matrix"] == "128.00 MiB"


@pytest.mark.system("S58")
@pytest.mark.parametrize("ranks", [2, 4])
def test_columns_are_shared_out_without_one_left(ranks: int) -> None:
    _, columns, shared = weights_guide().scene(ranks=str(ranks)).frames
    every = [tile.id for place in figure(columns, DiagramFigure).places for tile in place.tiles]
    assert every == [f"column {number}" for number in range(NEURONS)]
    places = figure(shared, DiagramFigure).places
    assert [tile.id for place in places for tile in place.tiles] == every
    assert len(places) == ranks
    assert columns_of_rank(2) == holds("distributed-10") == 8192
    assert facts(shared)["columns of a rank"] == f"{16_384 // ranks:,}"
