"""Products by either library are the same product; what is added to a sum is not rounded before."""

from __future__ import annotations

import pytest
import torch

from echelon.parallel.storage.matmul import add_product, matmul
from tests.parallel.buckets import Called, matrix


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


def gradient_parts(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return dy [700, 24] and x [700, 40]."""
    generator = torch.Generator().manual_seed(6)
    return [torch.randn((700, width), generator=generator).to(dtype) for width in (24, 40)]


@pytest.mark.parametrize("fresh", [False, True], ids=["added", "fresh"])
@pytest.mark.parametrize(
    ("made", "summed"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float64),
    ],
    ids=str,
)
def test_a_product_is_added_with_no_rounding_but_that_of_the_sum(
    made: torch.dtype, summed: torch.dtype, fresh: bool
) -> None:
    dy, x = gradient_parts(made)
    before = torch.full((24, 40), 3.0, dtype=summed)
    got = before.clone()
    add_product(got, dy, x, fresh=fresh, num_rows=256)
    exact = dy.double().t() @ x.double() + (0.0 if fresh else 3.0)
    most = dy.double().abs().t() @ x.double().abs() + 3.0
    # In bf16 PyTorch adds up in float32; the rounding is that of the result.
    eps = torch.finfo(summed).eps
    assert ((got.double() - exact).abs() <= (exact.abs() if eps > 1e-3 else most) * 4 * eps).all()


@pytest.mark.parametrize("fresh", [False, True], ids=["added", "fresh"])
def test_a_gpu_adds_a_narrow_product_in_one_kernel(fresh: bool) -> None:
    dy, x = (one.to("meta") for one in gradient_parts(torch.bfloat16))
    total = torch.empty((24, 40), device="meta")
    with Called() as called:
        add_product(total, dy, x, fresh=fresh, num_rows=256)
    assert called.names == ["aten::mm.dtype_out" if fresh else "aten::addmm.dtype_out"]
