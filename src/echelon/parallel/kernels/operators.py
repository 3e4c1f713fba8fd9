# SPDX-License-Identifier: Apache-2.0
"""Definition of an operator of `torch.ops.echelon`: opaque to autograd and to the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("echelon", "FRAGMENT")


def _nothing(*_: object) -> None:
    """Make nothing: all results are written into arguments."""


def define_operator(
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
    meta: Callable[..., Any] = _nothing,
) -> None:
    """Define the operator of a schema; `cuda` is `cpu` by default, `meta` knows shapes alone."""
    _LIBRARY.define(schema)
    for place, run in (("CPU", cpu), ("CUDA", cuda or cpu), ("Meta", meta)):
        _LIBRARY.impl(schema.partition("(")[0], run, place)
