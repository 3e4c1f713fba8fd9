"""What a table of kernels is made of: variants, the work of one call, and how to make the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]


class Absent(Exception):
    """A variant is not there for this device or torch; the message says which or why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Name a variant, the work of one call (FLOP or bytes), and how to make the call."""

    name: str
    work: float
    make: Callable[[], Call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Hold variants that are compared; `unit` says what their work counts."""

    title: str
    unit: str
    timings: Sequence[Timing]


def normal(device: torch.device, *size: int, grad: bool = False) -> torch.Tensor:
    """Return bf16 values drawn on the device."""
    return torch.randn(size, device=device, dtype=torch.bfloat16).requires_grad_(grad)
