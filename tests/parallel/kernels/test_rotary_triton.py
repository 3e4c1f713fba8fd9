"""Rotations and norms of heads in Triton, against float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from echelon.models.rotary import rotary_tables
from echelon.parallel.kernels import piece_formulas
from tests.parallel.kernels.interpreted import (
    DEVICE,
    DTYPES,
    EPS,
    assert_rounded_once,
    compare,
    exact,
    given,
    load_kernels,
)
from tests.parallel.layouts import NANO


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the kernels."""
    return load_kernels(monkeypatch, "rotary")


def projections(heads: tuple[int, int], dtype: torch.dtype, num_extra: int = 0) -> torch.Tensor:
    """Return queries and keys of 3 positions of 2 sequences side by side, more heads after them."""
    return given(3, 2, sum(heads) + num_extra, NANO.head_dim, dtype=dtype)


def tables(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of 3 positions."""
    cos, sin = rotary_tables(NANO, torch.arange(3) + 5, dtype)
    return cos.to(DEVICE), sin.to(DEVICE)


def pair(width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of norms of queries and keys."""
    return given(width, dtype=dtype, seed=6), given(width, dtype=dtype, seed=7)


HEADS = [(4, 2), (3, 1), (5, 5)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("normed", [False, True])
def test_heads(
    kernels: ModuleType, dtype: torch.dtype, heads: tuple[int, int], normed: bool
) -> None:
    weights = pair(NANO.head_dim, dtype)
    # Values lie behind queries and keys, so that tokens are further apart.
    qk = projections(heads, dtype, heads[1])[:, :, : sum(heads)]
    rest = (heads[0], tables(), weights if normed else None, EPS)
    compare(kernels.heads, "heads", qk, *rest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("direction", [1, -1])
def test_rotate(kernels: ModuleType, dtype: torch.dtype, direction: int) -> None:
    x = projections((4, 2), dtype)[:, :, 2:5]
    compare(kernels.rotate, "rotate", x, *tables(), direction)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("normed", [False, True])
def test_heads_backward(
    kernels: ModuleType, dtype: torch.dtype, heads: tuple[int, int], normed: bool
) -> None:
    num_q, num_k = heads
    width = NANO.head_dim
    # Attention may give gradients head by head.
    dq = given(2, num_q, 3, width, dtype=dtype, seed=2).permute(2, 0, 1, 3)
    dk, dv = (given(3, 2, num_k, width, dtype=dtype, seed=seed) for seed in (3, 4))
    x = projections(heads, dtype, num_k)[:, :, : num_q + num_k]
    weights = pair(width, dtype)
    inverse = piece_formulas.heads(x, num_q, tables(), weights, EPS)[2]
    compare(
        kernels.heads_backward,
        "heads_backward",
        (dq, dk, dv),
        tables(),
        (x, inverse, *weights) if normed else None,
        whole=False,
    )


def test_partial_sums_of_heads_are_of_several_tokens(kernels: ModuleType) -> None:
    num_tokens, width = 9, 2
    dq, dk, dv = (given(num_tokens, 1, 1, width, dtype=torch.float32, seed=s) for s in (1, 2, 3))
    x = given(num_tokens, 1, 2, width, dtype=torch.float32, seed=4)
    angles = given(num_tokens, 1, dtype=torch.float32, seed=5)
    turns = (angles.cos(), angles.sin())
    weights = pair(width, torch.float32)
    inverse = piece_formulas.heads(x, 1, turns, weights, EPS)[2]
    args = ((dq, dk, dv), turns, (x, inverse, *weights))
    got, sums = kernels.heads_backward(*args)
    right, right_sums = piece_formulas.heads_backward(*exact(args), whole=False)
    assert len(sums) == 3
    assert_rounded_once(got, right)
    assert_rounded_once(sums, right_sums)
