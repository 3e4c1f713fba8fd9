"""What compares kernels in Triton with float64: on a GPU, or in Triton's interpreter.

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

from echelon.cost.bytes import piece_traffic
from echelon.parallel.kernels import piece_formulas
from tests.parallel.buckets import matrix

EPS = 1e-5
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDED = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""One rounding, relative; of bf16 in the interpreter twice as much."""
SUMS = 2.0**-18
"""What sums of up to 64 products in float32 are off, in units of the largest of them."""


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_kernels(patch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Return kernels; where there is no GPU they are interpreted (`conftest.py`).

    A sum over rows is cut into few partial sums, so that each is of several rows.
    """
    pytest.importorskip("triton")
    patch.setattr(piece_traffic, "MOST_PARTIAL_SUMS", 4)
    return import_module(f"echelon.parallel.kernels.{name}_triton")


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
