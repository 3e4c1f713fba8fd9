"""A norm over the width of all tensor ranks is that of one device, and sends a few numbers."""

from __future__ import annotations

import pytest
import torch

from echelon.launch.local.supervisor import RankPool
from echelon.models.operations import Operations
from tests.parallel.kernels.width_norm.targets import EPS, norm_parts

ROWS, WIDTHS = (7, 3), (24, 8)
"""Positions and sequences; the widths of queries and of keys."""


def of_one_device(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Return y, dx and dw in float64."""
    x, dy = x.double().requires_grad_(), dy.double()
    parameter = torch.nn.Parameter(weight.double())
    y = Operations().norm(x, parameter, None, EPS)
    y.backward(dy)
    assert x.grad is not None
    assert parameter.grad is not None
    return [y.detach(), x.grad, parameter.grad]


@pytest.mark.parametrize(
    ("dtype", "ranks", "error"),
    [(torch.float64, 2, 1e-13), (torch.float32, 4, 2e-6), (torch.bfloat16, 2, 8e-3)],
    ids=str,
)
def test_parts_are_those_of_the_whole(
    rank_pool: RankPool, dtype: torch.dtype, ranks: int, error: float
) -> None:
    generator = torch.Generator().manual_seed(4)
    whole = [
        [torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
        for sizes in (
            [(*ROWS, width) for width in WIDTHS],
            [(width,) for width in WIDTHS],
            [(*ROWS, width) for width in WIDTHS],
        )
    ]
    results = rank_pool.run(norm_parts, whole, world_size=ranks)
    for place, (x, weight, dy) in enumerate(zip(*whole, strict=True)):
        right = of_one_device(x, weight, dy)
        for part, want in enumerate(right):
            got = torch.cat([found[place][part] for found, _ in results], dim=-1)
            scale = float(want.abs().max())
            torch.testing.assert_close(got.double(), want, rtol=error, atol=error * scale)
    # Two numbers of each row forward, in one message, and as many backward, in two.
    size = max(4, torch.empty(0, dtype=dtype).element_size())
    message = 2 * (ranks - 1) * 7 * 3 * size // ranks
    for _, events in results:
        assert [(one.name, one.bytes) for one in events] == [
            ("width_norm.forward", 2 * message),
            ("width_norm.backward", message),
            ("width_norm.backward", message),
        ]
