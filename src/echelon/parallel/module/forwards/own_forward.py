# SPDX-License-Identifier: Apache-2.0
"""A forward that one module has instead of its class's, and the calls that it must not answer.

A layer keeps its class, its hooks and its parameters; only where its values come from is ours. So a
copy of it, which has no buckets and no ranks, computes as its class says.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad


class OwnForward:
    """The forward of one module; copies and pickles of the module have that of their class."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    def of_class(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the class of the module computes."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the forward that a copy of the module has: it is in `memo` already."""
        return _forward_of_class(memo[id(self.module)])

    def __reduce__(self) -> tuple[Any, ...]:
        """Have a pickle hold the module, and the forward of its class."""
        return _forward_of_class, (self.module,)


def is_plain_call(x: Any) -> bool:
    """Return whether a function of ours may answer a call with `x`.

    It may not where `x` is no tensor; under autocast, which casts by the names of operations; while
    a graph is compiled, which knows the layer and not the function; nor where `is_transformed`.
    """
    return (
        isinstance(x, torch.Tensor)
        and not is_autocast(x)
        and not torch.compiler.is_compiling()
        and not is_transformed()
    )


def is_autocast(x: torch.Tensor) -> bool:
    """Return whether operations cast tensors on the device of `x`."""
    # The name of a device takes longer than all other questions that a call is asked.
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type)


def is_transformed() -> bool:
    """Return whether more than a backward is asked for: `torch.func`, or forward-mode AD.

    Functions of ours have a backward, and neither a rule for batches nor a forward derivative.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _forward_of_class(module: nn.Module) -> Callable[..., Any]:
    return MethodType(type(module).forward, module)
