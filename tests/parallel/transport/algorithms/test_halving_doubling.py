"""Halving and doubling: as few bytes as a ring in 2 log n steps."""

from __future__ import annotations

import pytest

from tests.parallel.transport.algorithms.targets import num_steps, sums_of


@pytest.mark.parametrize(("size", "levels"), [(2, 1), (4, 2), (8, 3)])
def test_bytes_of_a_ring_in_few_steps(size: int, levels: int) -> None:
    assert num_steps("halving-doubling", size, size) == 2 * levels
    for one in range(size):
        count = 16 * size
        halving = sums_of("halving-doubling", one, size, size).bytes(count, 4)
        assert halving == sums_of("ring", one, size, size).bytes(count, 4)
        assert halving == 2 * (size - 1) * count * 4 // size
