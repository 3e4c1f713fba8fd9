"""Rows that are gathered, scattered and summed, and their gradients: each the other's transpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from echelon.cost.bytes.terms import all_gather_bytes, all_reduce_bytes, reduce_scatter_bytes
from echelon.launch.local.supervisor import RankPool
from tests.parallel.transport import rows_targets as targets
from tests.parallel.transport.rows_targets import ROWS, WIDTH, Applied

Ranks = Sequence[dict[str, Applied]]
Expected = Callable[[Sequence[torch.Tensor], int], torch.Tensor]


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest, rank_pool: RankPool) -> Ranks:
    """Apply every function on one, two and three ranks."""
    return rank_pool.run(targets.apply_each, None, world_size=request.param)


def gathered(parts: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    return torch.cat(list(parts))


def summed(parts: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    return torch.stack(list(parts)).sum(0)


def unchanged(parts: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    return parts[index]


def own(parts: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    return parts[index].chunk(len(parts))[index]


def scattered(parts: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    return summed(parts, index).chunk(len(parts))[index]


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("GATHER_ROWS", gathered, scattered),
        ("SCATTER_ROWS", scattered, gathered),
        ("SUM_GRADIENT", unchanged, summed),
        ("SUM_ROWS", summed, unchanged),
        ("OWN_ROWS", own, gathered),
        ("WHOLE_ROWS", gathered, own),
    ],
)
def test_values_and_gradients(
    ranks: Ranks, name: str, forward: Expected, backward: Expected
) -> None:
    every = [rank[name] for rank in ranks]
    for index, one in enumerate(every):
        torch.testing.assert_close(one.y, forward([other.x for other in every], index))
        torch.testing.assert_close(one.dx, backward([other.dy for other in every], index))


def test_what_is_sent(ranks: Ranks) -> None:
    degree, whole = len(ranks), ROWS * WIDTH * 8
    gather = ("all_gather", all_gather_bytes(whole // degree, degree))
    scatter = ("reduce_scatter", reduce_scatter_bytes(whole // degree, degree))
    reduce = ("all_reduce", all_reduce_bytes(whole, degree))
    wanted = {
        "GATHER_ROWS": [("forward", *gather), ("backward", *scatter)],
        "SCATTER_ROWS": [("forward", *scatter), ("backward", *gather)],
        "SUM_GRADIENT": [("backward", *reduce)],
        "SUM_ROWS": [("forward", *reduce)],
        "OWN_ROWS": [("backward", *gather)],
        "WHOLE_ROWS": [("forward", *gather)],
    }
    for rank in ranks:
        for name, calls in wanted.items():
            found = [(event.name, event.kind, event.bytes) for event in rank[name].events]
            expected = [(f"{name}.{way}", kind, sent) for way, kind, sent in calls]
            assert found == (expected if degree > 1 else [])
