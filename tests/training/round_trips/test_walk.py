"""The walk over random round trips: some here, all of it in `make walk-round-trips`."""

from __future__ import annotations

import pytest

from echelon.launch.local.supervisor import RankPool
from tests.training.round_trips.walk import summary, walk_trips

TRIPS = 200


@pytest.mark.parametrize("trips", [1, pytest.param(TRIPS, marks=pytest.mark.slow)])
@pytest.mark.timeout(3600)
def test_random_models_go_there_and_back(trips: int, rank_pool: RankPool) -> None:
    lines = walk_trips(1, trips, pool=rank_pool)
    told = summary(lines)
    assert f"{trips} trips taken: {trips} the same, 0 differ" in told, told
