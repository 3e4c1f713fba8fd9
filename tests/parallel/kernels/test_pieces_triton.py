"""Kernels of the pieces in Triton: on a GPU, or in Triton's interpreter, against float64.

Each is computed in float32 and rounded once: u / 2 of a result of few digits, beside what sums in
float32 are off. The interpreter cuts what it turns into bf16, where a GPU rounds, so it is allowed
u there; fp16, which it rounds, tells that a number is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

from echelon.cost.activations import numbers
from echelon.models.rotary import rotary_tables
from echelon.parallel.kernels import piece_formulas
from tests.parallel.buckets import matrix
from tests.parallel.layouts import NANO

EPS = 1e-5
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDED = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""One rounding, relative; of bf16 in the interpreter twice as much."""
SUMS = 2.0**-18
"""What sums of up to 64 products in float32 are off, in units of the largest of them."""


Load = Callable[[str], ModuleType]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return what imports kernels; where there is no GPU they are interpreted (`conftest.py`).

    A sum over rows is cut into few partial sums, so that each is of several rows.
    """
    pytest.importorskip("triton")
    monkeypatch.setattr(numbers, "MOST_PARTIAL_SUMS", 4)
    return lambda name: import_module(f"echelon.parallel.kernels.{name}_triton")


def given(*shape: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Return random values of a dtype."""
    return matrix(*shape, seed=seed).detach().to(dtype).to(DEVICE)


def exact(value: Any) -> Any:
    """Return values in float64, whatever they lie in."""
    if isinstance(value, torch.Tensor):
        return value.double()
    if isinstance(value, tuple):
        return tuple(exact(one) for one in value)
    return value


def assert_rounded_once(got: torch.Tensor, right: torch.Tensor) -> None:
    """Assert that each number is the right one, computed in float32 and rounded once."""
    assert got.shape == right.shape
    if not got.numel():
        return
    assert not got.isnan().any()
    each = ROUNDED[got.dtype] * (2 if DEVICE.type == "cpu" and got.dtype == torch.bfloat16 else 1)
    largest = right.abs().max().clamp(min=1.0)
    bound = each * right.abs() + SUMS * largest
    if got.dtype == torch.float16:
        bound = bound + 2.0**-25
    assert ((got.double() - right).abs() <= bound).all()


def compare(kernel: Callable[..., Any], name: str, *args: Any, whole: bool | None = None) -> None:
    """Assert that a kernel gives what its formula gives in float64, and leaves its input alone."""
    before = [one.clone() for one in args if isinstance(one, torch.Tensor)]
    sums = {} if whole is None else {"whole": whole}
    right = getattr(piece_formulas, name)(*exact(args), **sums)
    got = kernel(*args)
    pairs = zip(got, right, strict=True) if isinstance(got, tuple) else [(got, right)]
    for mine, wanted in pairs:
        assert_rounded_once(mine, wanted)
    after = [one for one in args if isinstance(one, torch.Tensor)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@contextmanager
def apart(x: torch.Tensor, columns: int = 3) -> Iterator[torch.Tensor]:
    """Yield the same values with rows that lie apart."""
    wider = torch.full((*x.shape[:-1], x.shape[-1] + columns), float("nan"), dtype=x.dtype)
    wider = wider.to(x.device)
    wider[..., : x.shape[-1]] = x
    yield wider[..., : x.shape[-1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(5, 12), (1, 64), (7, 33)])
def test_norm_with_and_without_a_sum(load: Load, dtype: torch.dtype, rows: int, width: int) -> None:
    kernels = load("norm")
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
        (normed, inverse), piece_formulas.norm(*exact((total, weight)), EPS), strict=True
    ):
        assert_rounded_once(got, right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(5, 12), (1, 64), (9, 3)])
@pytest.mark.parametrize("around", [False, True])
def test_norm_backward(load: Load, dtype: torch.dtype, rows: int, width: int, around: bool) -> None:
    x, dy, beside = (given(rows, width, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    weight = given(width, dtype=dtype, seed=4)
    inverse = piece_formulas.norm(x.float(), weight, EPS)[1]
    args = (dy, x, inverse, weight, beside if around else None)
    compare(load("norm").norm_backward, "norm_backward", *args, whole=False)
    with apart(dy) as strided:
        compare(load("norm").norm_backward, "norm_backward", strided, *args[1:], whole=False)


def projections(heads: tuple[int, int], dtype: torch.dtype, num_extra: int = 0) -> torch.Tensor:
    """Return queries and keys of 3 positions of 2 sequences side by side, more heads after them."""
    return given(3, 2, sum(heads) + num_extra, NANO.head_dim, dtype=dtype)


def tables(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of 3 positions."""
    cos, sin = rotary_tables(NANO, torch.arange(3) + 5, dtype)
    return cos.to(DEVICE), sin.to(DEVICE)


HEADS = [(4, 2), (3, 1), (5, 5)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("normed", [False, True])
def test_heads(load: Load, dtype: torch.dtype, heads: tuple[int, int], normed: bool) -> None:
    weights = tuple(given(NANO.head_dim, dtype=dtype, seed=seed) for seed in (5, 6))
    # Values lie behind queries and keys, so that tokens are further apart.
    qk = projections(heads, dtype, heads[1])[:, :, : sum(heads)]
    rest = (heads[0], tables(), weights if normed else None, EPS)
    compare(load("rotary").heads, "heads", qk, *rest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("direction", [1, -1])
def test_rotate(load: Load, dtype: torch.dtype, direction: int) -> None:
    x = projections((4, 2), dtype)[:, :, 2:5]
    compare(load("rotary").rotate, "rotate", x, *tables(), direction)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("normed", [False, True])
def test_heads_backward(
    load: Load, dtype: torch.dtype, heads: tuple[int, int], normed: bool
) -> None:
    num_q, num_k = heads
    width = NANO.head_dim
    # Attention may give gradients head by head.
    dq = given(2, num_q, 3, width, dtype=dtype, seed=2).permute(2, 0, 1, 3)
    dk, dv = (given(3, 2, num_k, width, dtype=dtype, seed=seed) for seed in (3, 4))
    x = projections(heads, dtype, num_k)[:, :, : num_q + num_k]
    weights = tuple(given(width, dtype=dtype, seed=seed) for seed in (5, 6))
    inverse = piece_formulas.heads(x, num_q, tables(), weights, EPS)[2]
    compare(
        load("rotary").heads_backward,
        "heads_backward",
        (dq, dk, dv),
        tables(),
        (x, inverse, *weights) if normed else None,
        whole=False,
    )


def test_partial_sums_of_heads_are_of_several_tokens(load: Load) -> None:
    num_tokens, width = 9, 2
    dq, dk, dv = (given(num_tokens, 1, 1, width, dtype=torch.float32, seed=s) for s in (1, 2, 3))
    x = given(num_tokens, 1, 2, width, dtype=torch.float32, seed=4)
    angles = given(num_tokens, 1, dtype=torch.float32, seed=5)
    pair = (angles.cos(), angles.sin())
    weights = tuple(given(width, dtype=torch.float32, seed=seed) for seed in (6, 7))
    inverse = piece_formulas.heads(x, 1, pair, weights, EPS)[2]
    args = ((dq, dk, dv), pair, (x, inverse, *weights))
    got, sums = load("rotary").heads_backward(*args)
    right, right_sums = piece_formulas.heads_backward(*exact(args), whole=False)
    assert len(sums) == 3
    assert_rounded_once(got, right)
    assert_rounded_once(sums, right_sums)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [12, 1025])
@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_both_ways(load: Load, dtype: torch.dtype, width: int, weighted: bool) -> None:
    kernels = load("swiglu")
    gate_up, dy = given(3, 2 * width, dtype=dtype) * 4, given(3, width, dtype=dtype, seed=2)
    weights = given(3, dtype=torch.float32, seed=3) if weighted else None
    with apart(gate_up) as wider, apart(dy) as strided:
        if weights is None:
            compare(kernels.swiglu, "swiglu", gate_up)
            compare(kernels.swiglu, "swiglu", wider)
            compare(kernels.swiglu_backward, "swiglu_backward", strided, wider)
        else:
            compare(kernels.weighted_swiglu, "weighted_swiglu", wider, weights)
            args = (strided, wider, weights)
            compare(kernels.weighted_swiglu_backward, "weighted_swiglu_backward", *args)


def test_of_no_rows_nothing_is_made(load: Load) -> None:
    swiglu, none = load("swiglu"), given(0, 8, dtype=torch.bfloat16)
    y, dgate_up, dweights = swiglu.weighted_swiglu_backward(none[:, :4], none, none[:, 0].float())
    assert (y.shape, dgate_up.shape, dweights.shape) == ((0, 4), (0, 8), (0,))
    assert swiglu.swiglu(none).shape == (0, 4)


@pytest.mark.parametrize("value", [-100.0, 100.0])
def test_far_from_zero_nothing_overflows(load: Load, value: float) -> None:
    gate_up = torch.full((1, 4), value, dtype=torch.bfloat16, device=DEVICE)
    dy = torch.ones((1, 2), dtype=torch.bfloat16, device=DEVICE)
    compare(load("swiglu").swiglu, "swiglu", gate_up)
    compare(load("swiglu").swiglu_backward, "swiglu_backward", dy, gate_up)
