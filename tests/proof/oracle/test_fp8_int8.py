"""The oracle's rounding to int8, from its definition."""

from __future__ import annotations

import torch

from echelon.proof.oracle.fp8 import as_gathered


def test_numbers_become_multiples_of_the_largest_over_127() -> None:
    row = torch.tensor([[127.0, 1.4, -2.6, 0.5, 0.0, 0.0, 0.0, 0.0, -1.27, 0.004, 0.006, 1.0]])
    found = as_gathered("w", row.double(), 4)
    wanted = [[127.0, 1.0, -3.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.27, 0.0, 0.01, 1.0]]
    assert torch.allclose(found, torch.tensor(wanted, dtype=torch.float64), atol=1e-6)


def test_blocks_are_of_rows_and_stay_apart() -> None:
    matrix = torch.randn(3, 8, dtype=torch.float64)
    found = as_gathered("w", matrix, 4)
    matrix[1, 4:] *= 100
    again = as_gathered("w", matrix, 4)
    assert torch.equal(again[0], found[0])
    assert torch.equal(again[1, :4], found[1, :4])
    assert not torch.equal(again[1, 4:], found[1, 4:])


def test_vectors_routers_and_positions_stay_as_they_are() -> None:
    matrix = torch.randn(2, 4)
    for name in ("layers.0.mlp.router.weight", "positions.weight"):
        assert as_gathered(name, matrix, 4) is matrix
    assert as_gathered("norm.weight", matrix[0], 4) is not None
    assert torch.equal(as_gathered("norm.weight", matrix[0], 4), matrix[0])
    assert as_gathered("w", matrix, 0) is matrix
