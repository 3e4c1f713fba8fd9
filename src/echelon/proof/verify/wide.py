# SPDX-License-Identifier: Apache-2.0
"""Float64 all the way: norms and softmaxes that ask for float32 get what they were given.

Many modules compute a norm or a softmax in float32 whatever their dtype is. In a float64 proof that
rounds, and hides errors below 1e-8. Here a conversion of float64 to float32 is none, and grouped
products, which PyTorch has for narrower numbers only, are made one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_GROUPED = ("grouped_mm", "_grouped_mm")


class StayWide(TorchFunctionMode):
    """Leave float64 tensors as wide as they are, inside of a `with`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function; where it would narrow float64 to float32, float64 stays."""
        named = dict(kwargs or {})
        x = args[0] if args else None
        if torch.is_tensor(x) and x.dtype is torch.float64:
            if func is torch.Tensor.float:
                return x
            if getattr(func, "__name__", "") in _GROUPED:
                return _products(x, *args[1:], **named)
            args = tuple(torch.float64 if one is torch.float32 else one for one in args)
            if named.get("dtype") is torch.float32:
                named["dtype"] = torch.float64
        return func(*args, **named)


def _products(
    rows_SI: torch.Tensor, weights_EIO: torch.Tensor, offs: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Return the product of each group of rows with its weight; `offs` are where groups end."""
    ends: list[int] = offs.tolist()
    starts = [0, *ends[:-1]]
    parts = [
        rows_SI[start:end] @ weight
        for start, end, weight in zip(starts, ends, weights_EIO, strict=True)
    ]
    rest = rows_SI.new_zeros((len(rows_SI) - ends[-1], weights_EIO.shape[-1]))
    return torch.cat([*parts, rest])
