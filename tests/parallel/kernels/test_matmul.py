"""Products by either library are the same product."""

from __future__ import annotations

import pytest
import torch

from echelon.parallel.kernels.matmul import matmul
from tests.parallel.buckets import matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(5, 3, 4), (256, 320, 272), (4096, 64, 80)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_is_rounded_as_its_dtype_allows(
    dtype: torch.dtype, shape: tuple[int, int, int], transposed: bool
) -> None:
    num_rows, inputs, outputs = shape
    with torch.no_grad():
        x = matrix(num_rows, inputs).to(dtype)
        weight = matrix(outputs, inputs, seed=1).to(dtype)
        if transposed:
            weight = weight.t().contiguous().t()
        y = matmul(x, weight)
        expected = x.double() @ weight.double().t()
        # What float32 may lose is a multiple of the sum of the magnitudes, not of the result.
        most = x.abs().double() @ weight.abs().double().t()
    assert y.dtype == dtype
    assert ((y.double() - expected).abs() <= 8 * torch.finfo(dtype).eps * most).all()
