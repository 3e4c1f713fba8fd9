"""Memory that is the system's again when its tensor is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.training.checkpoint.sub_tensor import own_memory


@pytest.mark.parametrize("shape", [(3,), (0, 4), (300, 200), (5, 100, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_it_is_a_tensor_of_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = own_memory(shape, dtype)
    assert (tuple(made.shape), made.dtype) == (shape, dtype)
    assert made.is_contiguous()
    assert not made.any()
    assert (made + 1).sum() == made.numel()


def test_it_is_given_back_at_once() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    held = own_memory((2**24,), torch.float32).fill_(1.0)
    with_it = resident()
    del held
    assert with_it - resident() >= 2**26 - 2**22
