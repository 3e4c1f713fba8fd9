"""8-bit numbers: every code, ties, what is tiny, large or none, scales, and products."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from echelon.models.precision import E4M3, E5M2
from echelon.parallel.kernels import fp8
from echelon.parallel.kernels.fp8 import (
    Fp8Matrix,
    multiply,
    power_of_two_scales,
    quantised_rows,
    quantised_weight,
    quantised_whole,
    rounded_to_fp8,
    weight_gradient,
)

WIDE = (torch.float32, torch.float64)
LARGEST = 448.0


def number_of_code(code: int) -> float:
    """Return what a code of e4m3 stands for, by the definition of its bits."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


NUMBERS = np.array([number_of_code(code) for code in range(127)])
"""All numbers that are not below zero, in order."""


def nearest_code(x: float) -> int:
    """Return the code of the nearest number, exactly; of two as near the even one, with its sign.

    What is above the largest becomes that.
    """
    size = Fraction(abs(x))
    above = min(int(np.searchsorted(NUMBERS, abs(x))), 126)
    below = max(above - 1, 0)
    left, right = size - Fraction(NUMBERS[below]), Fraction(NUMBERS[above]) - size
    if size >= Fraction(NUMBERS[126]):
        found = 126
    elif left == right:
        found = below if below % 2 == 0 else above
    else:
        found = below if left < right else above
    return found | (0x80 if math.copysign(1.0, x) < 0 else 0)


def codes(x: torch.Tensor) -> list[int]:
    return rounded_to_fp8(x, E4M3).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, *WIDE])
def test_every_code_stands_for_itself(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(E4M3)
    numbers = every.to(dtype).tolist()
    wanted = [number_of_code(code) for code in range(256)]
    assert np.array_equal(numbers, wanted, equal_nan=True)
    real = torch.tensor([one for one in range(256) if one & 0x7F != 0x7F], dtype=torch.uint8)
    assert codes(real.view(E4M3).to(dtype)) == real.tolist()


@pytest.mark.parametrize("dtype", WIDE)
def test_ties_and_their_neighbours_are_rounded_right(dtype: torch.dtype) -> None:
    # Neighbours in float32: between these, float64 is a tie.
    ties = torch.tensor((NUMBERS[:-1] + NUMBERS[1:]) / 2, dtype=torch.float32)
    below = torch.nextafter(ties, torch.zeros_like(ties))
    above = torch.nextafter(ties, torch.full_like(ties, 1e9))
    for x in (one.to(dtype) for one in (ties, -ties, below, above)):
        assert codes(x) == [nearest_code(one) for one in x.tolist()]


@pytest.mark.parametrize("dtype", WIDE)
def test_numbers_of_every_size_are_rounded_right(dtype: torch.dtype) -> None:
    size = torch.exp2(14 * torch.rand(4000, dtype=torch.float64) - 11)
    x = (size * torch.randn(4000, dtype=torch.float64).sign()).clamp(-448, 448).to(dtype)
    tiny = torch.tensor([0.0, 2.0**-10, 2.0**-11, 1e-30, 3 * 2.0**-10], dtype=dtype)
    for one in (x, tiny, -tiny):
        assert codes(one) == [nearest_code(number) for number in one.tolist()]


@pytest.mark.parametrize("dtype", WIDE)
def test_a_scale_is_the_least_power_of_two_that_fits(dtype: torch.dtype) -> None:
    near = torch.tensor([LARGEST * 2.0**k for k in range(-100, 100)], dtype=dtype)
    for largest in (near, torch.nextafter(near, 2 * near), torch.nextafter(near, 0 * near)):
        scale = power_of_two_scales(largest).to(torch.float64)
        assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
        assert bool((largest.double() <= LARGEST * scale).all())
        assert bool((largest.double() > LARGEST * scale / 2).all())


def test_scales_of_what_is_nothing_tiny_or_no_number() -> None:
    largest = torch.tensor([0.0, 1e-44, math.inf, math.nan, 3e38])
    found = power_of_two_scales(largest).tolist()
    assert found[:2] == [1.0, 2.0**-126]
    assert math.isnan(found[2])
    assert math.isnan(found[3])
    assert found[4] == 2.0**120
    x = torch.zeros(2, 8)
    x[0, 3] = math.inf
    # A number that is none is seen in all of its tile, and nowhere else.
    back = quantised_rows(x, 4).numbers(torch.float32)
    assert torch.isnan(back).tolist() == [[True] * 4 + [False] * 4, [False] * 8]


@pytest.mark.parametrize("dtype", [torch.bfloat16, *WIDE])
@pytest.mark.parametrize("square", [False, True])
def test_each_tile_has_its_own_scale(dtype: torch.dtype, square: bool) -> None:
    x = (torch.randn(8, 12) * torch.logspace(-6, 6, 96, base=2).view(8, 12)).to(dtype)
    made = quantised_weight(x, 4) if square else quantised_rows(x, 4)
    height = 4 if square else 1
    assert made.scales.shape == (8 // height, 3)
    back = made.numbers(torch.float64)
    for row in range(8):
        for column in range(12):
            scale = float(made.scales[row // height, column // 4])
            code = nearest_code(float(x[row, column]) / scale)
            assert float(back[row, column]) == number_of_code(code) * scale
    # In bf16 what codes stand for is exact.
    assert torch.equal(made.numbers(torch.bfloat16).double(), back)


def test_a_tile_of_more_rows_than_a_piece_holds_is_the_same() -> None:
    x = torch.randn(300, 2048)
    whole = quantised_rows(x, 128)
    parts = [quantised_rows(x[at : at + 7], 128) for at in range(0, 300, 7)]
    assert torch.equal(whole.scales, torch.cat([one.scales for one in parts]))
    assert torch.equal(
        whole.codes.view(torch.uint8), torch.cat([one.codes.view(torch.uint8) for one in parts])
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, *WIDE])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_is_that_of_what_codes_stand_for(dtype: torch.dtype, transposed: bool) -> None:
    x = quantised_rows(torch.randn(6, 8).to(dtype), 4)
    weight = quantised_weight(torch.randn(8, 8).to(dtype), 4)
    made = multiply(x, weight, dtype, transposed=transposed)
    right = weight.numbers(torch.float64)
    exact = x.numbers(torch.float64) @ (right if transposed else right.t())
    assert made.dtype == dtype
    # Products are exact in float32; 8 sums of it, and one rounding of the result.
    size = x.numbers(torch.float64).abs() @ (right if transposed else right.t()).abs()
    sums = 8 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    allowed = sums * size + torch.finfo(dtype).eps / 2 * exact.abs()
    assert bool(((made.double() - exact).abs() <= allowed).all())
    out = torch.empty_like(made)
    assert torch.equal(multiply(x, weight, dtype, transposed=transposed, out=out), made)


@pytest.mark.skipif(not hasattr(torch, "_scaled_mm"), reason="PyTorch has no product of codes")
def test_pytorch_multiplies_codes_alike() -> None:
    scaled_mm: Any = getattr(torch, "_scaled_mm")  # noqa: B009
    x, weight = quantised_rows(torch.randn(16, 32), 32), quantised_weight(torch.randn(32, 32), 32)
    for row in range(16):
        alone = x.rows(slice(row, row + 1))
        made = scaled_mm(
            alone.codes.expand(16, -1).contiguous(),
            weight.codes.t(),
            alone.scales[0, 0],
            weight.scales[0, 0],
            out_dtype=torch.float32,
        )
        right = multiply(alone, weight, torch.float32)
        size = alone.numbers(torch.float32).abs() @ weight.numbers(torch.float32).abs().t()
        assert bool(((made[:1] - right).abs() <= 32 * 2.0**-23 * size).all())


@pytest.mark.parametrize("transposed", [False, True])
def test_a_rehearsal_meets_one_kernel_for_each_product(transposed: bool) -> None:
    x = torch.empty(48, 256, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(256 if transposed else 384, 256, dtype=torch.bfloat16, device="meta")
    made = multiply(
        quantised_rows(x, 128), quantised_weight(weight, 128), x.dtype, transposed=transposed
    )
    assert made.shape == (48, 256 if transposed else 384)
    assert made.dtype == torch.bfloat16
    assert isinstance(quantised_rows(x, 128), Fp8Matrix)


def test_no_rows_make_no_rows() -> None:
    none = quantised_rows(torch.empty(0, 8), 4)
    assert none.scales.shape == (0, 2)
    weight = quantised_weight(torch.randn(4, 8), 4)
    assert multiply(none, weight, torch.float32).shape == (0, 4)


def test_a_scale_that_is_given_cuts_off_what_is_larger_and_hides_nothing() -> None:
    x = torch.tensor([[1.0, 448.0, 449.0, -1e9, float("inf"), float("nan")]])
    made = quantised_whole(x, torch.tensor(1.0))
    assert made.is_whole
    assert made.numbers(torch.float32)[0, :4].tolist() == [1.0, 448.0, 448.0, -448.0]
    assert made.numbers(torch.float32)[0, 4:].isnan().all()
    coarse = quantised_whole(x, torch.tensor(2.0**-7), kind=E5M2)
    assert coarse.codes.dtype == E5M2
    assert coarse.numbers(torch.float64)[0, :4].tolist() == [1.0, 448.0, 448.0, -448.0]


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_a_scale_is_the_least_that_fits(kind: torch.dtype) -> None:
    most = fp8.LARGEST[kind]
    largest = torch.tensor([most, most * 1.01, most / 2, most / 1.99, 0.0])
    assert power_of_two_scales(largest, kind).tolist() == [1.0, 2.0, 0.5, 1.0, 1.0]


def test_products_of_whole_matrices_are_exact() -> None:
    x, weight = torch.randn(5, 32, dtype=torch.float64), torch.randn(16, 32, dtype=torch.float64)
    codes = quantised_whole(x, torch.tensor(0.25)), quantised_whole(weight, torch.tensor(0.5))
    wanted = codes[0].numbers(torch.float64) @ codes[1].numbers(torch.float64).t()
    assert torch.equal(multiply(*codes, torch.float64), wanted)
    assert torch.equal(
        codes[0].rows(slice(1, 3)).numbers(torch.float64), codes[0].numbers(torch.float64)[1:3]
    )
    # On a CPU it is the product of the numbers, which the store takes.
    assert weight_gradient(codes[0], codes[0], torch.float32) is None


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("num_tokens", [5, 32])
def test_all_three_products_have_a_kernel_where_a_device_is_rehearsed(
    kind: torch.dtype, num_tokens: int
) -> None:
    with torch.device("meta"):
        scale = torch.empty(())
        x = quantised_whole(torch.empty(num_tokens, 64, dtype=torch.bfloat16), scale)
        weight = quantised_whole(torch.empty(32, 64, dtype=torch.bfloat16), scale)
        dy = torch.empty(num_tokens, 32, dtype=torch.bfloat16)
        dy_codes = quantised_whole(dy, scale, kind=kind)
    assert multiply(x, weight, torch.bfloat16).shape == (num_tokens, 32)
    assert multiply(dy_codes, weight, torch.bfloat16, transposed=True).shape == (num_tokens, 64)
    made = weight_gradient(dy_codes, x, torch.bfloat16)
    # A proof in float64 adds up in float64.
    assert weight_gradient(dy_codes, x, torch.float64) is None
    assert made is not None
    assert made.shape == (32, 64)
    assert made.dtype == torch.float32
