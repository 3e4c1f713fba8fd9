"""Products in 8 bits by the kernels of a GPU, beside what their codes stand for, in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from echelon.models.precision import E4M3, E5M2
from echelon.parallel.kernels import fp8
from echelon.parallel.kernels.fp8 import Fp8Matrix

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(300),
]
ROWS = (1, 2, 3, 4, 5, 8, 31, 48, 100, 256)
WIDTHS = {"whole": (16, 48, 128, 384), "blocks": (128, 256, 384, 512, 640)}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""What rounding a sum to the dtype takes off, relative to it."""

SUM_ROUNDING = 2.0**-8
"""What adding up takes off, relative to the sum of all sizes: Hopper adds 32 products of 8 bits to
each other with 14 bits, so each loses up to 2**-13 of the largest of them (DeepSeek-V3, 2024,
section 3.3.2, appendix B)."""


def _pair(kind: str, rows: int, inner: int, outer: int, dtype: torch.dtype) -> list[Fp8Matrix]:
    """Return rows [rows, inner] and a weight [outer, inner] whose tiles differ in size."""
    generator = torch.Generator().manual_seed(rows + inner + outer)
    x = torch.randn(rows, inner, generator=generator).to("cuda", dtype)
    weight = torch.randn(outer, inner, generator=generator).to("cuda", dtype)
    if kind == "whole":
        # One of several: where it lies is no whole multiple of 16 bytes.
        scale = torch.full((4,), 2.0**-6, device="cuda")[rows % 4]
        return [fp8.quantised_whole(one, scale) for one in (x, weight)]
    x *= torch.arange(1, inner // 128 + 1, device="cuda").repeat_interleave(128) ** 2
    weight *= torch.arange(1, outer // 128 + 1, device="cuda").repeat_interleave(128)[:, None] ** 2
    return [fp8.quantised_rows(x, 128), fp8.quantised_weight(weight, 128)]


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_the_numbers(kind: str, transposed: bool, dtype: torch.dtype) -> None:
    wrong: dict[tuple[int, ...], float] = {}
    for rows, inner, outer in product(ROWS, WIDTHS[kind], WIDTHS[kind]):
        x = _pair(kind, rows, outer if transposed else inner, 128, dtype)[0]
        weight = _pair(kind, 1, inner, outer, dtype)[1]
        numbers = weight.numbers(torch.float64)
        made = fp8.multiply(x, weight, dtype, transposed=transposed)
        assert made.dtype == dtype
        numbers = numbers if transposed else numbers.t()
        over = _over(made, x.numbers(torch.float64), numbers)
        if not over <= 1.0:
            wrong[rows, inner, outer] = over
    assert wrong == {}


def _over(made: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest error of a product as a part of what it may be."""
    wanted, size = left @ right, left.abs() @ right.abs()
    exact = made.dtype == torch.float64
    allowed = (1e-13 if exact else SUM_ROUNDING) * size
    allowed += ROUNDING.get(made.dtype, 2.0**-23) * wanted.abs() + 1e-300
    return float(((made.double() - wanted).abs() / allowed).max())


@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
def test_gradients_of_weights_are_those_of_the_numbers(kind: torch.dtype) -> None:
    scale = torch.tensor(2.0**-6, device="cuda")
    for rows, inner, outer in product(ROWS, WIDTHS["whole"], WIDTHS["whole"]):
        x = _pair("whole", rows, inner, 128, torch.bfloat16)[0]
        dy = torch.randn(rows, outer, device="cuda")
        codes = fp8.quantised_whole(dy, scale, kind=kind)
        made = fp8.weight_gradient(codes, x, torch.bfloat16)
        assert made is not None
        assert _over(made, codes.numbers(torch.float64).t(), x.numbers(torch.float64)) <= 1.0
