"""What one layer sends forward and its transpose backward: each pair is gradient-correct."""

from __future__ import annotations

import pytest
import torch

from echelon.core.event import Event
from echelon.launch.local.supervisor import RankPool
from tests.parallel.tensor import pair_targets
from tests.parallel.tensor.pair_targets import PairResult

Ranks = list[tuple[PairResult, PairResult, list[Event]]]


def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum over ranks."""
    return torch.stack(tensors).sum(0)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality up to the order of a sum."""
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_identity_forward_is_an_all_reduce_backward_and_the_other_way_round(
    rank_pool: RankPool, size: int
) -> None:
    ranks: Ranks = rank_pool.run(pair_targets.pair_results, False, world_size=size)
    columns, rows = [rank[0] for rank in ranks], [rank[1] for rank in ranks]
    for column, row in zip(columns, rows, strict=True):
        close(column.y, column.x)
        close(column.dx, total([one.dy for one in columns]))
        close(row.y, total([one.x for one in rows]))
        close(row.dx, row.dy)
    assert [event.name for event in ranks[0][2]] == ["column.backward", "row.forward"]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_gather_forward_is_a_reduce_scatter_backward_and_the_other_way_round(
    rank_pool: RankPool, size: int
) -> None:
    ranks: Ranks = rank_pool.run(pair_targets.pair_results, True, world_size=size)
    columns, rows = [rank[0] for rank in ranks], [rank[1] for rank in ranks]
    for index, (column, row) in enumerate(zip(columns, rows, strict=True)):
        close(column.y, torch.cat([one.x for one in columns]))
        close(column.dx, total([one.dy for one in columns]).chunk(size)[index])
        close(row.y, total([one.x for one in rows]).chunk(size)[index])
        close(row.dx, torch.cat([one.dy for one in rows]))
    # A pair is right when backward is the transpose: <A x, g> = <x, A^T g> over all ranks.
    for layer in (columns, rows):
        forward = sum(float((one.y * one.dy).sum()) for one in layer)
        backward = sum(float((one.x * one.dx).sum()) for one in layer)
        assert forward == pytest.approx(backward, rel=1e-12)
