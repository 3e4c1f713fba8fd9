"""Gathered keys: a window gets the rows that it reaches, and no others."""

from __future__ import annotations

from echelon.launch.local.supervisor import RankPool
from tests.parallel.context.cases import (
    HD,
    HEADS,
    B,
    context_plan,
    inputs_of,
    run,
    total,
)


def test_a_window_sends_its_own_length_only(rank_pool: RankPool) -> None:
    """Of 4 x 2 chunks of 6 positions, a window of 3 needs the last two keys of the one before."""
    element = 2 * B * HEADS["gqa"][1] * HD * 8
    for kind in ("ring", "gathered"):
        plan = context_plan(kind, 4, 1, window=3)
        ranks = run(plan, inputs_of(plan, documents=False), rank_pool)
        # Seven borders between chunks, of which one lies inside of the last rank.
        assert sum(total(rank.forward) for rank in ranks) == 6 * 2 * element
        assert sum(total(rank.backward) for rank in ranks) == 2 * 6 * 2 * element
