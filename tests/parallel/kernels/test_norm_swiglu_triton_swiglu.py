"""SwiGLU in Triton, plain and weighted, against float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.parallel.kernels.interpreted import (
    DEVICE,
    DTYPES,
    apart,
    compare,
    given,
    load_kernels,
)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the kernels."""
    return load_kernels(monkeypatch, "norm_swiglu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [12, 1025])
@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_both_ways(
    kernels: ModuleType, dtype: torch.dtype, width: int, weighted: bool
) -> None:
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


def test_of_no_rows_nothing_is_made(kernels: ModuleType) -> None:
    none = given(0, 8, dtype=torch.bfloat16)
    y, dgate_up, dweights = kernels.weighted_swiglu_backward(none[:, :4], none, none[:, 0].float())
    assert (y.shape, dgate_up.shape, dweights.shape) == ((0, 4), (0, 8), (0,))
    assert kernels.swiglu(none).shape == (0, 4)


@pytest.mark.parametrize("value", [-100.0, 100.0])
def test_far_from_zero_nothing_overflows(kernels: ModuleType, value: float) -> None:
    gate_up = torch.full((1, 4), value, dtype=torch.bfloat16, device=DEVICE)
    dy = torch.ones((1, 2), dtype=torch.bfloat16, device=DEVICE)
    compare(kernels.swiglu, "swiglu", gate_up)
    compare(kernels.swiglu_backward, "swiglu_backward", dy, gate_up)
