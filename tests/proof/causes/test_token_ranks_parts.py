"""Gradients cut by context rank add up; places say where each position lies."""

from __future__ import annotations

import pytest
import torch

from echelon.proof.causes.token_ranks import (
    context_positions,
    loss_gradients_by_rank,
    row_gradients_by_rank,
    tokens_by_context_rank,
)
from echelon.proof.oracle.oracle import run_oracle
from tests.proof.layouts import CONTEXTS, context_layout


@pytest.mark.parametrize("kind", CONTEXTS)
def test_the_parts_of_context_ranks_add_up(kind: str) -> None:
    plan = context_layout(kind)
    (oracle,) = run_oracle(plan, 1)
    assert sum(tokens_by_context_rank(plan, 0).values()) == oracle.tokens
    for name in ("embedding.weight", "layers.0.attention.k.weight", "layers.1.mlp_norm.weight"):
        right = oracle.gradients[name]
        by_rows, by_losses = (
            row_gradients_by_rank(plan, oracle, name),
            loss_gradients_by_rank(plan, oracle, name),
        )
        for parts in (by_rows, by_losses):
            assert len(parts) == plan.mesh.dp * plan.mesh.cp
            torch.testing.assert_close(sum(parts.values()), right)
        # They are two ways to cut it, but for what comes after the last attention.
        differ = float((by_rows[0, 0] - by_losses[0, 0]).norm() / right.norm())
        assert (differ < 1e-12) == (name == "layers.1.mlp_norm.weight")


@pytest.mark.parametrize("kind", CONTEXTS)
def test_places_say_where_each_position_lies(kind: str) -> None:
    plan = context_layout(kind)
    placement, places = plan.placement, context_positions(plan.placement)
    for rank in range(placement.degree):
        held = (places.rank_T == rank).nonzero()[:, 0]
        order = places.local_T[held].argsort()
        assert held[order].tolist() == placement.positions(rank)
        assert set(places.ring_rank_T[held].tolist()) == {placement.ring_place(rank)}
    everywhere = list(range(placement.length))
    for moved_T in (places.contiguous_T, places.moved(1), places.moved_ranks(1)):
        assert sorted(moved_T.tolist()) == everywhere
    assert places.moved(0).tolist() == places.moved_ranks(0).tolist() == everywhere
    assert bool(
        (places.rank_T[places.moved_ranks(1)] == (places.rank_T + 1) % placement.degree).all()
    )
