# SPDX-License-Identifier: Apache-2.0
"""An update in one pass over memory, as an operator of PyTorch for each rule that has one.

On a GPU, where what is updated is float32, it is a kernel in Triton
(`parallel/kernels/update_triton.py`) that reads a gradient in its own dtype and writes what the
parameters are kept as. Elsewhere the rule's own fused update runs, with a cast before and after it:
so a plan with kernels for GPUs is proven where there are none. On tensors without elements nothing
runs, and a rehearsal counts one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

_LIBRARY = torch.library.Library("echelon", "FRAGMENT")
_IN_TRITON = "echelon.parallel.kernels.update_triton"

UPDATES: Any = torch.ops.echelon
"""Where the operators are found, by their names."""


def define_update(schema: str, run: Callable[..., None]) -> None:
    """Make an operator that `run` computes anywhere but where there are no elements."""
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    for place in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, place)
    _LIBRARY.impl(name, _nothing, "Meta")


def _nothing(*_: Any) -> None:
    """Run nothing: an update changes no shape."""


def kernels_for(target: torch.Tensor) -> Any | None:
    """Return the kernels that update a tensor; None where the rule's own update does."""
    if target.is_cuda and target.dtype == torch.float32:
        return import_module(_IN_TRITON)
    return None


def scaled(gradient: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a gradient in `dtype`, times a factor; the gradient itself stays as it is."""
    wide = gradient.to(dtype)
    return wide if factor == 1.0 else wide * factor


def publish(target: torch.Tensor, values: torch.Tensor | None) -> None:
    """Write what was updated where the parameters are, unless it is them."""
    if values is not None:
        values.copy_(target)
