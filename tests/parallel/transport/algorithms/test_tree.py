"""The tree: few steps, and the bytes of parents and leaves."""

from __future__ import annotations

import pytest

from tests.parallel.transport.algorithms.targets import num_steps, sums_of


@pytest.mark.parametrize(("size", "levels"), [(2, 1), (4, 2), (8, 3)])
def test_a_tensor_goes_up_and_down_log_n_levels(size: int, levels: int) -> None:
    assert num_steps("tree", size, size) == 2 * levels


def test_leaves_send_once_and_the_root_to_each_child() -> None:
    sent = [sums_of("tree", one, 8, 8).bytes(10, 4) // 40 for one in range(8)]
    assert sent == [3, 1, 2, 1, 3, 1, 2, 1]
    assert sum(sent) == 2 * 7
