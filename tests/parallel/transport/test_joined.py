"""Process groups of others: one communicator for each, whoever asks."""

from __future__ import annotations

from echelon.launch.context import RankContext
from echelon.launch.local.pool import RankPool
from echelon.parallel.transport.joined import joined_group


def join_twice(context: RankContext, _: None) -> tuple[bool, tuple[int, ...], int]:
    """Return what two groups over all ranks have in common."""
    first, second = joined_group(None), joined_group(None)
    return first.communicator is second.communicator, first.ranks, second.index


def test_a_process_group_has_one_communicator(rank_pool: RankPool) -> None:
    found = rank_pool.run(join_twice, None, world_size=2)
    assert found == [(True, (0, 1), rank) for rank in range(2)]
