"""Sums of rows for each token by the kernel of a GPU: on one, or in Triton's interpreter.

The interpreter cuts what it turns into bf16, where a GPU rounds: fp16 stands for it there.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.parallel.kernels.interpreted import DEVICE, load_kernels
from tests.parallel.kernels.test_expert_kernels_row_sums import (
    one_after_the_other,
    rows_of_tokens,
)

DTYPES = [
    *(torch.float16, torch.float32, torch.float64),
    *([torch.bfloat16] if DEVICE.type == "cuda" else []),
]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the kernels."""
    return load_kernels(monkeypatch, "expert_kernels")


@pytest.mark.parametrize("width", [64, 200, 2500])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_added_in_their_order_and_rounded_once(
    kernels: ModuleType, dtype: torch.dtype, width: int
) -> None:
    given = rows_of_tokens(dtype, DEVICE, width)
    wanted = one_after_the_other(*given)
    assert torch.equal(kernels.row_sums(*given), wanted)


def test_rows_may_lie_apart_or_turned(kernels: ModuleType) -> None:
    rows, order, starts = rows_of_tokens(torch.float32, DEVICE)
    wanted = one_after_the_other(rows, order, starts)
    apart = torch.full((len(rows), 2 * rows.shape[1]), torch.nan, device=DEVICE)
    apart[:, : rows.shape[1]] = rows
    turned = rows.t().contiguous().t()
    for one in (apart[:, : rows.shape[1]], turned):
        assert torch.equal(kernels.row_sums(one, order, starts), wanted)


def test_no_tokens_have_no_sums(kernels: ModuleType) -> None:
    rows, order, starts = rows_of_tokens(torch.float32, DEVICE)
    assert kernels.row_sums(rows, order[:0], starts[:0]).shape == (0, rows.shape[1])
