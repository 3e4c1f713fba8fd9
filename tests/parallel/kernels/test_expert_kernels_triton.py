"""The gradients of all experts by the kernel of a GPU: on one, or in Triton's interpreter.

The interpreter's products of bf16 are none: fp16 stands for it. Where Triton is not there, nothing
is run.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from tests.parallel.kernels.test_expert_kernels import (
    COUNTS,
    GAP,
    INPUTS,
    OUTPUTS,
    assert_sums,
    exact,
    given,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the kernels; where there is no GPU, as the interpreter runs them."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return import_module("echelon.parallel.kernels.expert_kernels_triton")


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [True, False])
def test_the_kernel_does_the_same(
    kernels: ModuleType, dtype: torch.dtype, fresh: bool, wide: bool
) -> None:
    sums, dy, x, ends, flat = given(dtype, DEVICE)
    if not wide:
        flat = flat.to(dtype)
        sums = flat.as_strided(sums.shape, sums.stride())
    wanted, sizes = exact(sums.cpu(), dy.cpu(), x.cpu(), fresh)
    kernels.add_grouped_gradient(sums, dy, x, ends, fresh=fresh)
    assert_sums(sums.cpu(), wanted, sizes)
    between = flat.as_strided((len(COUNTS), GAP - OUTPUTS * INPUTS), (GAP, 1), OUTPUTS * INPUTS)
    assert bool((between == 5.0).all())
