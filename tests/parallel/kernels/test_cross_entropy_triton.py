"""The kernels of a GPU: on one, or in Triton's interpreter; where Triton is not there, nothing.

The interpreter cuts what it turns into bf16, where a GPU rounds: fp16, which it rounds, tells that
a number is rounded once.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest
import torch

from echelon.core.piece_sizes import PROOF_PIECES
from echelon.parallel.kernels import cross_entropy

TOKENS, WIDTH = 5, 9000
LABELS = torch.tensor([0, WIDTH - 1, 5000, 3, 4096])
MINE = torch.tensor([True, True, False, True, True])
FACTOR = torch.tensor([0.5, 0.25, 1.0, 0.0, 1.0])
BOUNDS = {torch.float32: 1e-6, torch.float16: 2.0**-11 + 1e-6, torch.bfloat16: 2.0**-7}


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def kernels() -> ModuleType:
    """Return the kernels; where there is no GPU, as the interpreter runs them (`conftest.py`)."""
    pytest.importorskip("triton")
    return import_module("echelon.parallel.kernels.cross_entropy_triton")


def to_device(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tensors where the kernels run."""
    return tuple(one.to(DEVICE) for one in tensors)


def logits(dtype: torch.dtype) -> torch.Tensor:
    """Return logits over more columns than a program takes, one row of them far away."""
    values = torch.randn((TOKENS, WIDTH), generator=torch.Generator().manual_seed(2)) * 3
    values[1] -= 300.0
    return values.to(dtype)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_both_passes_are_those_of_a_cpu(kernels: ModuleType, dtype: torch.dtype) -> None:
    mine, labels, counted, factor = to_device(logits(dtype), LABELS, MINE, FACTOR)
    on_device = kernels.row_statistics(mine, labels)
    got = on_device.cpu()
    assert torch.equal(mine.cpu(), logits(dtype))
    expected = cross_entropy.row_statistics(logits(dtype), LABELS, PROOF_PIECES)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0.0)
    log_sum_C = got[0] + got[1].log()
    exact = (logits(dtype).double() - log_sum_C.unsqueeze(1).double()).exp()
    exact[torch.arange(TOKENS), LABELS] -= MINE.double()
    exact *= FACTOR.unsqueeze(1)
    kernels.overwrite_with_gradient(mine, log_sum_C.to(DEVICE), labels, counted, factor)
    least = 2.0**-25 if dtype == torch.float16 else 1e-7
    assert ((mine.cpu().double() - exact).abs() <= BOUNDS[dtype] * exact.abs() + least).all()


def test_columns_of_padding_count_nothing_and_get_nothing(kernels: ModuleType) -> None:
    mine, labels, none, factor = to_device(logits(torch.float32), LABELS % 10, ~MINE & MINE, FACTOR)
    mine[:, 10:] = float("-inf")
    got = kernels.row_statistics(mine, labels)
    torch.testing.assert_close(got[1], (mine[:, :10] - got[0].unsqueeze(1)).exp().sum(1))
    kernels.overwrite_with_gradient(mine, got[0], labels, none, factor)
    assert not mine[:, 10:].any()
    mine[:] = float("-inf")
    maximum, total, _ = kernels.row_statistics(mine, labels)
    assert maximum.isfinite().all()
    assert not total.any()
