"""The small MLP: 64 weights on one rank, 32 on each of two, and the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.handbook.errata.claims import all_claims
from echelon.page.lessons.matrices import mlp_weights
from echelon.page.lessons.tensor.toy_mlp import (
    BOTH,
    WITH,
    WITHOUT,
    toy_mlp,
    weights_held,
)
from tests.page.lessons.shown import facts, numbers, tiles, tiles_of


@pytest.mark.system("S58")
def test_weights_are_those_of_the_guide_and_of_what_is_drawn() -> None:
    (claim,) = (one for one in all_claims() if one.id == "llm-training-28")
    specs = mlp_weights(4, 8)
    assert [weights_held(specs, 1), weights_held(specs, 2)] == claim.holds == [64, 32]
    first = toy_mlp().scene(tensor=BOTH).frames[0]
    for group, held in (("without: one rank", 64), ("with: rank 0", 32), ("with: rank 1", 32)):
        drawn = [*tiles_of(first, "W1", group), *tiles_of(first, "W2", group)]
        assert sum(len(row) for one in drawn for row in numbers(one.label)) == held
    assert facts(first)["weights on a rank"] == "64 without, 32 with"


def test_both_ways_come_to_the_same_numbers() -> None:
    frames = toy_mlp().scene(tensor=BOTH).frames
    assert len(frames) == 5
    last = tiles(frames[4])
    parts = [np.array(numbers(last[f"z{rank}"].label)) for rank in range(2)]
    alone = np.array(numbers(last["alone-z"].label))
    assert np.array_equal(parts[0] + parts[1], alone)
    assert [np.array_equal(np.array(numbers(last[f"y{r}"].label)), alone) for r in (0, 1)] == [
        True,
        True,
    ]
    assert facts(frames[4])["equal to one rank"] == "yes"


@pytest.mark.parametrize("shown", [WITHOUT, WITH])
def test_one_way_alone_is_the_same_figure_with_less_in_it(shown: str) -> None:
    both, one = (toy_mlp().scene(tensor=name).frames for name in (BOTH, shown))
    for whole, part in zip(both, one, strict=True):
        drawn = tiles(whole)
        assert all(drawn[name] == tile for name, tile in tiles(part).items())
        assert 0 < len(tiles(part)) < len(drawn)
