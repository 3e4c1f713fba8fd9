"""Norms in Triton, with and without a sum, against float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from echelon.parallel.kernels import piece_formulas
from tests.parallel.kernels.interpreted import (
    DTYPES,
    EPS,
    apart,
    assert_rounded_once,
    compare,
    exact,
    given,
    load_kernels,
)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the kernels."""
    return load_kernels(monkeypatch, "norm_swiglu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(5, 12), (1, 64), (7, 33)])
def test_norm_with_and_without_a_sum(
    kernels: ModuleType, dtype: torch.dtype, rows: int, width: int
) -> None:
    x, y, weight = (
        given(*shape, dtype=dtype, seed=s)
        for s, shape in enumerate(((rows, width), (rows, width), (width,)))
    )
    compare(kernels.norm, "norm", x, weight, EPS)
    with apart(x) as strided:
        compare(kernels.norm, "norm", strided, weight, EPS)
    total, normed, inverse = kernels.add_norm(x, y, weight, EPS)
    if dtype == torch.bfloat16:
        assert_rounded_once(total, x.double() + y.double())
    else:
        assert torch.equal(total, x + y)
    for got, right in zip(
        (normed, inverse), piece_formulas.norm(exact(total), exact(weight), EPS), strict=True
    ):
        assert_rounded_once(got, right)


@pytest.mark.quick(
    "True-9-3-torch.bfloat16",
    "False-9-3-torch.float32",
    "True-5-12-torch.float16",
    "False-1-64-torch.float32",
    "True-1-64-torch.bfloat16",
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(5, 12), (1, 64), (9, 3)])
@pytest.mark.parametrize("around", [False, True])
def test_norm_backward(
    kernels: ModuleType, dtype: torch.dtype, rows: int, width: int, around: bool
) -> None:
    x, dy, beside = (given(rows, width, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    weight = given(width, dtype=dtype, seed=4)
    inverse = piece_formulas.norm(x.float(), weight, EPS)[1]
    args = (dy, x, inverse, weight, beside if around else None)
    compare(kernels.norm_backward, "norm_backward", *args, whole=False)
    with apart(dy) as strided:
        compare(kernels.norm_backward, "norm_backward", strided, *args[1:], whole=False)
