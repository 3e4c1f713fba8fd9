"""The hierarchy: as many bytes as a ring, and few of them between nodes."""

from __future__ import annotations

import pytest

from tests.parallel.transport.algorithms.targets import sums_of


@pytest.mark.system("S12")
@pytest.mark.parametrize(("nodes", "each"), [(2, 2), (2, 4), (4, 2), (3, 3)])
def test_bytes_of_each_tier(nodes: int, each: int) -> None:
    size, count = nodes * each, 32 * nodes * each
    flat = [0] * nodes
    for one in range(size):
        near, far = sums_of("hierarchical", one, size, each).bytes_by_tier(count, 4)
        assert near == 2 * (each - 1) * count * 4 // each
        assert far == 2 * (nodes - 1) * count * 4 // size
        assert near + far == 2 * (size - 1) * count * 4 // size
        flat[one // each] += sums_of("ring", one, size, each).bytes_by_tier(count, 4)[1]
    # A node sends 2 (k-1)/k M; in a ring of all ranks its last one sends 2 (n-1)/n M.
    assert flat == [2 * (size - 1) * count * 4 // size] * nodes
    assert each * far < flat[0]
